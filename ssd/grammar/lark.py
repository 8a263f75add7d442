"""Reads grammars in Lark's notation as far as `llguidance` does not."""

from __future__ import annotations

import json
import re

# Comments, strings and regular expressions come first. Each may lack its end, so that reading takes linear time.
_PARTS = re.compile(
    r"""
    //[^\n]* | \#[^\n]* | "[^"\\\n]*(?:\\.[^"\\\n]*)*"? | /[^/\\\n]*(?:\\.[^/\\\n]*)*/?
    | (?P<limit>\bmax_tokens\s*=)
    | (?P<before>^[ \t]*)[?!]*(?P<name>[a-zA-Z_]\w*)(?:\.-?\d+)?(?=\s*(?:\[|\{|:(?!:=)))
    """,
    re.VERBOSE | re.MULTILINE,
)


def without_hints(source: str) -> str:
    """Return a grammar without the marks of rules that change no text: `?rule`, `!rule` and priorities, as `rule.2`."""

    def plain(part: re.Match[str]) -> str:
        return part[0] if part["name"] is None else part["before"] + part["name"]

    return _PARTS.sub(plain, source)


def counts_tokens(grammar: str) -> bool:
    """Return True if a serialized grammar limits the tokens of a lexeme (`max_tokens`)."""
    if "max_tokens" not in grammar:
        return False
    if not grammar.lstrip().startswith("{"):
        return any(part["limit"] for part in _PARTS.finditer(grammar))
    return any(counts_tokens(each.get("lark_grammar") or "") for each in json.loads(grammar)["grammars"])
