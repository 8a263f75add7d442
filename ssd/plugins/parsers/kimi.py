"""Calls of Kimi K2: JSON between marks of their own, each call with a numbered id."""

from __future__ import annotations

import re
from itertools import count
from typing import Any

from ssd.frontend.parsers.rules import Rules
from ssd.frontend.parsers.source import Malformed, Reading
from ssd.frontend.parsers.tools import ToolParser

_CALLS, _CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _ARGUMENTS, _CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_FUNCTIONS = "functions."
_ID = re.compile(r"[\w.:-]*")
_INDEX = re.compile(r":\d+$")


class KimiK2(ToolParser):
    """`<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`: Kimi K2.

    Around the calls are `<|tool_calls_section_begin|>` and its end."""

    special = frozenset({_CALLS, _CALLS_END, _CALL, _ARGUMENTS, _CALL_END})
    call_marks = (_CALLS, _CALL)

    @classmethod
    def fits(cls, template: str) -> bool:
        return _ARGUMENTS in template

    @classmethod
    def turns(cls, conversation: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
        """Return the conversation with ids as the model writes them, with a call's name and number."""
        ids: dict[str, str] = {}
        numbers = count()
        for message in conversation:
            for call in message.get("tool_calls") or ():
                ids[call["id"]] = call["id"] = f"{_FUNCTIONS}{call['function']['name']}:{next(numbers)}"
            if (given := message.get("tool_call_id")) in ids:
                message["tool_call_id"] = ids[given]
        return conversation

    @classmethod
    def after_mark(cls, rules: Rules) -> str:
        begin, end = f"/[0-9]{{1,3}}/ {rules.marker(_ARGUMENTS)}", rules.marker(_CALL_END)
        calls = [
            f"{rules.name(each, _FUNCTIONS, ':')} {begin} {rules.arguments(each)} {end}" for each in rules.functions
        ]
        return f"{rules.repeated(f'{rules.marker(_CALL)} {rules.any_of(calls)}', '')} {rules.marker(_CALLS_END)}"

    def parse(self) -> Reading[None]:
        yield from self._blocks({_CALLS: _CALLS_END, _CALL: _CALLS_END}, _CALL, self._one)

    def _one(self) -> Reading[None]:
        """Read a call after its mark, with the mark after it, and report it. Raises Malformed."""
        yield from self._text.skip_space()
        name = _INDEX.sub("", (yield from self._text.take(_ID)).removeprefix(_FUNCTIONS))
        yield from self._text.separator(_ARGUMENTS)
        arguments = yield from self._text.json_object()
        if not name:
            raise Malformed
        self._call(name, arguments)
        yield from self._drop(_CALL_END)
