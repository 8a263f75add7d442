"""Calls of tools as XML."""

from __future__ import annotations

import re

from ssd.frontend.parsers.rules import Rules
from ssd.frontend.parsers.source import SPACE, Malformed, Reading
from ssd.frontend.parsers.tools import ToolParser
from ssd.plugins.parsers.values import Arguments, ValueShape, expression

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_VALUE_ENDS = (_PARAMETER_END, _PARAMETER, _FUNCTION_END)
_BETWEEN_ENDS = (_PARAMETER, _FUNCTION_END, _CALL_END)
_NAME = re.compile(r"[^<>\n]*")
_SHAPE = ValueShape(_PARAMETER, ">\n", f"\n{_PARAMETER_END}\n", _VALUE_ENDS)  # as the templates write them


class Qwen3Coder(ToolParser):
    """`<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`: Qwen 3 Coder and Qwen 3.5.

    A value ends at the first `</parameter>`; text between there and the next parameter is left out, as in vLLM. Without
    `<tool_call>`, only calls of the request's tools are calls."""

    special = frozenset({_CALL, _CALL_END})
    call_marks = (_CALL, _FUNCTION)
    separator = "\n"

    @classmethod
    def fits(cls, template: str) -> bool:
        return _CALL in template and _FUNCTION in template

    @classmethod
    def after_mark(cls, rules: Rules) -> str:
        before, after, end = f"\n{_FUNCTION}", ">\n", rules.text(f"{_FUNCTION_END}\n")
        calls = [f"{rules.name(each, before, after)} {expression(rules, each, _SHAPE)}" for each in rules.functions]
        return f"{rules.any_of(calls)} {end} {rules.marker(_CALL_END)}"

    def parse(self) -> Reading[None]:
        yield from self._marked_calls(self._function, _CALL, _FUNCTION)

    def _function(self, mark: str) -> Reading[None]:
        """Read a call after `<tool_call>` or `<function=`, and report it. Raises Malformed."""
        if mark == _CALL:
            yield from self._text.skip_space()
            yield from self._text.expect(_FUNCTION)
        name = yield from self._tag()
        if mark == _FUNCTION and name not in self._offered:
            raise Malformed
        arguments = Arguments(self._offered.get(name))
        between, marker = yield from self._text.up_to(*_BETWEEN_ENDS)
        if between.strip(SPACE):
            raise Malformed
        while marker == _PARAMETER:
            key = yield from self._tag()
            value, marker = yield from self._text.up_to(*_VALUE_ENDS)
            arguments.add(key, value.removeprefix("\n").removesuffix("\n"))
            if marker == _PARAMETER_END:
                _, marker = yield from self._text.up_to(*_BETWEEN_ENDS)
        self._call(name, arguments.as_json())
        if marker == _FUNCTION_END:
            yield from self._drop(_CALL_END)

    def _tag(self) -> Reading[str]:
        name = yield from self._text.take(_NAME)
        yield from self._text.expect(">")
        if not name:
            raise Malformed
        return name
