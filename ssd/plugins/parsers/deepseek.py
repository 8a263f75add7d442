"""Calls of DeepSeek: JSON between marks (V3, R1, V3.1), or a kind of XML (V3.2, V4)."""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

from ssd.frontend.parsers.rules import CallableFunction, Rules
from ssd.frontend.parsers.source import NAME, Malformed, Reading
from ssd.frontend.parsers.tools import ToolParser
from ssd.plugins.parsers.values import Arguments

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEP, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_JSON, _JSON_END = "```json", "```"

_DSML = "｜DSML｜"
_BLOCKS = {f"<{_DSML}{name}>": f"</{_DSML}{name}>" for name in ("function_calls", "tool_calls")}
_INVOKE, _INVOKE_END = f"<{_DSML}invoke name=", f"</{_DSML}invoke>"
_PARAMETER, _PARAMETER_END = f"<{_DSML}parameter name=", f"</{_DSML}parameter>"
_QUOTED = re.compile(r'[^"<>\n]*')
_KINDS = ('" string="true">', '" string="false">', '">')


class DeepSeekV3(ToolParser):
    """`<｜tool▁call▁begin｜>function<｜tool▁sep｜>f`, then a fence with JSON: DeepSeek V3 and R1.

    Around the calls are `<｜tool▁calls▁begin｜>` and its end. V3.1's calls are read, too."""

    special = frozenset({_CALLS, _CALLS_END, _CALL, _SEP, _CALL_END})
    call_marks = (_CALLS, _CALL)
    between: ClassVar[str] = r'"\n"'
    """The grammar expression of the text between two calls."""

    @classmethod
    def fits(cls, template: str) -> bool:
        return _SEP in template and _JSON in template

    @classmethod
    def turns(cls, conversation: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
        """Return the conversation with arguments as text, and None for no content, for own templates."""
        if re.search(r"arguments['\"\]]*\s*\|\s*tojson", template):
            return conversation
        for message in conversation:
            for call in message.get("tool_calls") or ():
                message["content"] = message["content"] or None
                given = call["function"]["arguments"]
                call["function"]["arguments"] = (
                    given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
                )
        return conversation

    @classmethod
    def after_mark(cls, rules: Rules) -> str:
        calls = rules.any_of([cls._one_call(rules, each) for each in rules.functions])
        one = f"{rules.marker(_CALL)} {calls} {rules.marker(_CALL_END)}"
        return rules.any_of([f"{rules.repeated(one, cls.between)} {rules.marker(_CALLS_END)}"])

    @classmethod
    def _one_call(cls, rules: Rules, function: CallableFunction) -> str:
        name, end = rules.name(function, after=f"\n{_JSON}\n"), rules.text(f"\n{_JSON_END}")
        return f'"function" {rules.marker(_SEP)} {name} {rules.arguments(function)} {end}'

    def parse(self) -> Reading[None]:
        yield from self._blocks({_CALLS: _CALLS_END, _CALL: _CALLS_END}, _CALL, self._one)

    def _one(self) -> Reading[None]:
        """Read a call after its mark, with the mark after it, and report it. Raises Malformed."""
        text = self._text
        yield from text.skip_space()
        name = yield from text.take(NAME)
        yield from text.expect(_SEP)
        yield from text.skip_space()
        fenced = (yield from text.peek()) != "{"
        if fenced:
            name = (yield from text.take(NAME)) or (name if name in self._offered else "")
            yield from text.separator(_JSON)
        arguments = yield from text.json_object()
        if not name:
            raise Malformed
        self._call(name, arguments)
        if fenced:
            yield from self._drop(_JSON_END)
        yield from self._drop(_CALL_END)


class DeepSeekV31(DeepSeekV3):
    """`<｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`: DeepSeek V3.1. V3's calls are read, too."""

    between = ""

    @classmethod
    def fits(cls, template: str) -> bool:
        return _SEP in template and _JSON not in template

    @classmethod
    def _one_call(cls, rules: Rules, function: CallableFunction) -> str:
        return f"{rules.name(function)} {rules.marker(_SEP)} {rules.arguments(function)}"


class DeepSeekV32(ToolParser):
    """`<｜DSML｜invoke name="f">` and `<｜DSML｜parameter name="a" string="true">b</｜DSML｜parameter>`: V3.2 and V4.

    Around them are `<｜DSML｜function_calls>` (V4: `tool_calls`) and its end.

    A value with `string="false"` is JSON, if it can be; without `string` the tool's schema decides. An `invoke` may
    hold an object."""

    special = frozenset({_DSML})

    @classmethod
    def fits(cls, template: str) -> bool:
        return _DSML in template

    def parse(self) -> Reading[None]:
        yield from self._blocks(_BLOCKS, _INVOKE, self._invoke)

    def _invoke(self) -> Reading[None]:
        """Read a call after `<｜DSML｜invoke name=`, and report it. Raises Malformed."""
        text = self._text
        name = yield from self._quoted('">')
        yield from text.skip_space()
        if (yield from text.peek()) == "{":
            given = yield from text.json_object()
            yield from text.skip_space()
            yield from text.expect(_INVOKE_END)
            self._call(name, given)
            return
        arguments = Arguments(self._offered.get(name))
        while (yield from text.one_of((_PARAMETER, _INVOKE_END))) == _PARAMETER:
            key = yield from self._quoted("")
            kind = yield from text.one_of(_KINDS)
            value, _ = yield from text.up_to(_PARAMETER_END)
            arguments.add(key, value, None if kind == '">' else "true" in kind)
            yield from text.skip_space()
        self._call(name, arguments.as_json())

    def _quoted(self, after: str) -> Reading[str]:
        """Read a name after its first quote, and the text `after` it. Raises Malformed."""
        yield from self._text.expect('"')
        name = yield from self._text.take(_QUOTED)
        yield from self._text.expect(after)
        if not name:
            raise Malformed
        return name
