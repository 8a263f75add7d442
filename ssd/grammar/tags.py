"""Structural tags: free text in which each mark begins a part that must obey a schema."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ssd.errors import refused_grammar
from ssd.grammar.closing import closed

WHITESPACE = r"[ \n\r\t]{1,40}"
"""White space between the parts of JSON, limited because a weak model would write nothing else."""
_Mark = Annotated[str, Meta(min_length=1, max_length=256)]


class _Structure(msgspec.Struct, forbid_unknown_fields=True):
    """A part of the text between `begin` and `end` that must obey `schema`."""

    begin: _Mark
    end: Annotated[str, Meta(max_length=256)]
    schema: dict[str, Any] | bool = True


class _Tags(msgspec.Struct, forbid_unknown_fields=True):
    """A client's structural tags: each trigger in the text begins one of the structures."""

    structures: Annotated[list[_Structure], Meta(min_length=1, max_length=256)]
    triggers: Annotated[list[_Mark], Meta(min_length=1, max_length=256)]
    type: Literal["structural_tag"] = "structural_tag"


_DECODER = msgspec.json.Decoder(_Tags)


def structural_tags(source: str) -> str:
    """Return the grammar, in Lark's notation, of vLLM's `structures` and `triggers`. Raises RequestError."""
    try:
        tags = _DECODER.decode(source)
    except (msgspec.DecodeError, RecursionError) as error:
        raise refused_grammar(f"structural_tag: {error}") from None
    triggers = list(dict.fromkeys(tags.triggers))
    for one in triggers:
        if any(one in other for other in triggers if other != one):
            raise refused_grammar(f"structural_tag: the trigger {one[:64]!r} lies in another one")
    begun: dict[str, list[str]] = {trigger: [] for trigger in triggers}
    lines = []
    for number, structure in enumerate(tags.structures):
        trigger = next(filter(structure.begin.startswith, triggers), None)
        if trigger is None:
            raise refused_grammar(f"structural_tag: no trigger begins {structure.begin[:64]!r}")
        if structure.schema is False:
            raise refused_grammar("structural_tag: nothing obeys the schema false")
        schema = closed(structure.schema) if isinstance(structure.schema, dict) else {}
        schema = {"x-guidance": {"whitespace_pattern": WHITESPACE}, **schema}
        lines.append(f"schema_{number}: %json {json.dumps(schema)}")
        parts = [_text(structure.begin.removeprefix(trigger)), f"schema_{number}", _text(structure.end)]
        begun[trigger].append(" ".join(filter(None, parts)))
    for number, (trigger, bodies) in enumerate(begun.items()):
        if not bodies:
            raise refused_grammar(f"structural_tag: the trigger {trigger[:64]!r} begins none of the structures")
        lines.append(f"trigger_{number}[lazy]: PLAIN {_text(trigger)}")
        lines.append(f"tag_{number}: trigger_{number} ({' | '.join(bodies)})")
    barred = "|".join(re.escape(trigger).replace("/", r"\/") for trigger in triggers)
    any_tag = " | ".join(f"tag_{number}" for number in range(len(triggers)))
    start = [f"start: ({any_tag})* PLAIN", f"PLAIN: /(?s:.*)/ & ~/(?s:.*)({barred})(?s:.*)/"]
    return "\n".join(start + lines)


def _text(text: str) -> str:
    """Return the expression of exactly this text, "" for none."""
    return quoted(text) if text else ""


def quoted(text: str) -> str:
    """Return a text as a literal of Lark: JSON, with DEL escaped too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
