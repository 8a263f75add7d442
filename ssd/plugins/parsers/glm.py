"""Calls of GLM: a name, then keys and values between tags."""

from __future__ import annotations

from ssd.frontend.parsers.rules import Rules
from ssd.frontend.parsers.source import NAME, SPACE, Malformed, Reading
from ssd.frontend.parsers.tools import ToolParser
from ssd.plugins.parsers.values import Arguments, ValueShape, expression

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_SHAPE = ValueShape(_KEY, f"{_KEY_END}\n{_VALUE}", f"{_VALUE_END}\n", (_VALUE_END,))


class Glm(ToolParser):
    """`<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>`: GLM 4.5 and later.

    A value ends at the first `</arg_value>`. Line breaks may stand between the tags."""

    special = frozenset({_CALL, _CALL_END, _KEY, _KEY_END, _VALUE, _VALUE_END})
    call_marks = (_CALL,)
    separator = "\n"

    @classmethod
    def fits(cls, template: str) -> bool:
        return _KEY in template and _VALUE in template

    @classmethod
    def after_mark(cls, rules: Rules) -> str:
        end = "\n"
        calls = [f"{rules.name(each, after=end)} {expression(rules, each, _SHAPE)}" for each in rules.functions]
        return f"{rules.any_of(calls)} {rules.marker(_CALL_END)}"

    def parse(self) -> Reading[None]:
        yield from self._marked_calls(self._one, _CALL)

    def _one(self, _: str) -> Reading[None]:
        """Read a call after its mark, and report it. Raises Malformed."""
        text = self._text
        yield from text.skip_space()
        if not (name := (yield from text.take(NAME))):
            raise Malformed
        arguments = Arguments(self._offered.get(name))
        yield from text.skip_space()
        while (yield from text.one_of((_KEY, _CALL_END))) == _KEY:
            key, _ = yield from text.up_to(_KEY_END)
            yield from text.skip_space()
            yield from text.expect(_VALUE)
            value, _ = yield from text.up_to(_VALUE_END)
            arguments.add(key.strip(SPACE), value)
            yield from text.skip_space()
        self._call(name, arguments.as_json())
