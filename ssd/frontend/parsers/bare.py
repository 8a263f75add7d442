"""Calls in JSON, between the marks of their format or as models write them without.

**The rule of bare calls.** A call without the format's mark is read at the beginning of the answer, at that of a line,
and after another call. It is an object with the name of a tool of the request, under `name` or `function`, and an
object of arguments, under `arguments` or `parameters`, perhaps in a string. Beside them may be `id` and `type`, nothing
else. Several such objects follow each other, with `;`, `,` or white space between them, or are a list. A fence (three
backquotes, with or without a word such as `json`) and a tag (`<tools>`) may be around them, and vanish with them.

Text that may become a call is held back. It is content, to the letter, at the first character at which it cannot. In a
fence with other text, nothing but its end is looked for."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar

from ssd.frontend.parsers.source import SPACE, Malformed, Reading
from ssd.frontend.parsers.tools import Offered, ToolParser, object_in

_TAGS = {f"<{name}>": f"</{name}>" for name in ("tools", "tool_call", "function_call")}
_CALL_END = "</tool_call>"
_LABELS = ("json", "tool_calls", "tool_call", "tool_code", "tools", "function_call", "xml", "")
_FENCE = "```"
_STARTS = ("\n{", "\n[", "\n<", f"\n{_FENCE}")
_TICKS = re.compile("`*")
_BLANK = re.compile(r"[ \t]*")
_NAMES = ('"name"', '"function"')
_ARGUMENTS = ('"arguments"', '"parameters"')
_KEYS = (*_NAMES, *_ARGUMENTS, '"id"', '"type"')


class JsonCalls(ToolParser):
    """Base of the formats whose calls are objects with `name` and `arguments`.

    Between the `marks`, an object may name any tool."""

    marks: ClassVar[Mapping[str, str]]
    """The marks before calls, each with the one after them; "" for none."""
    unmarked: ClassVar[bool] = False
    """True if calls without a mark, at the beginning of an answer, are the format's own."""

    def __init__(self, offered: Offered, exact: bool = False) -> None:
        super().__init__(offered, exact)
        self._may_call = self.unmarked or not exact  # here begins a line or the answer, or a call ended
        self._fence = ""  # the backquotes around the text that comes
        self._names = {json.dumps(name, ensure_ascii=ascii): name for name in offered for ascii in (True, False)}

    @classmethod
    @abstractmethod
    def fits(cls, template: str) -> bool: ...

    def parse(self) -> Reading[None]:
        while mark := (yield from self._bare_calls(*self.marks)):
            yield from self._text.skip_space()
            try:
                yield from self._marked()
            except Malformed:
                self._give_back()
            else:
                if closing := self.marks[mark]:
                    yield from self._drop(closing)

    def _marked(self) -> Reading[None]:
        """Read the calls after a mark. Raises Malformed."""
        yield from self._calls(self._json_call)

    def _bare_calls(self, *marks: str) -> Reading[str]:
        """Read content and bare calls up to the first mark of the format, and return the mark; "" at the end."""
        while True:
            if self._may_call:
                self._may_call = False
                yield from self._text.skip_space()
                for mark in marks:
                    if (yield from self._text.accept(mark)):
                        return mark
                try:
                    yield from self._fence_end() if self._fence else self._bare()
                except Malformed:
                    self._give_back()
                if self._may_call:
                    continue
            starts = () if self._exact else (_STARTS[-1:] if self._fence else _STARTS)
            mark = yield from self._content(*marks, *starts)
            if mark not in starts:
                return mark
            self._text.back(len(mark) - 1)
            self._may_call = True

    def _bare(self) -> Reading[None]:
        """Read calls, and what is around them. Raises Malformed where no call comes."""
        fence = tag_end = ""
        if not self._exact:
            fence = yield from self._text.take(_TICKS)
            if 0 < len(fence) < len(_FENCE):
                raise Malformed
            if fence:
                self._fence = fence
                yield from self._text.one_of(_LABELS)
                yield from self._text.skip_space()
            for tag, closing in _TAGS.items():
                if (yield from self._text.accept(tag)):
                    tag_end = closing
                    yield from self._text.skip_space()
                    break
        yield from self._calls(self._bare_call)
        if not self._exact:
            yield from self._drop(tag_end or _CALL_END)  # models forget the opening tag
        if fence and (yield from self._drop(fence)):
            self._fence = ""

    def _fence_end(self) -> Reading[None]:
        """Read the backquotes of a line if they end the fence. Raises Malformed, since they are content."""
        ticks = yield from self._text.take(_TICKS)
        yield from self._text.take(_BLANK)
        if len(ticks) >= len(self._fence) and (yield from self._text.peek()) in ("", "\n"):
            self._fence = ""
        raise Malformed

    def _calls(self, call: Callable[[], Reading[None]]) -> Reading[None]:
        """Read a list of calls, or one or several. Raises Malformed."""
        listed = yield from self._text.accept("[")
        while True:
            yield from self._text.skip_space()
            yield from call()
            yield from self._text.skip_space()
            if listed:
                if (yield from self._text.accept("]")):
                    self._text.mark()
                    return
                yield from self._text.expect(",")
            else:
                yield from self._text.one_of((";", ",", ""))
                yield from self._text.skip_space()
                if (yield from self._text.peek()) != "{":
                    self._give_back()
                    return

    def _bare_call(self) -> Reading[None]:
        """Read an object that calls a tool of the request, and report it. Raises Malformed."""
        name = arguments = ""
        yield from self._text.expect("{")
        while True:
            yield from self._text.skip_space()
            key = yield from self._text.one_of(_KEYS)
            yield from self._text.skip_space()
            yield from self._text.expect(":")
            yield from self._text.skip_space()
            if key in _NAMES and not name:
                name = self._names[(yield from self._text.one_of(self._names))]
            elif key in _ARGUMENTS and not arguments:
                arguments = object_in((yield from self._text.json_object(beginning='{"')))
            elif key in ('"id"', '"type"'):
                yield from self._text.json_object(beginning='"')
            else:  # given twice
                raise Malformed
            yield from self._text.skip_space()
            if (yield from self._text.accept("}")):
                break
            yield from self._text.expect(",")
        if not name or not arguments:
            raise Malformed
        self._call(name, arguments)

    def _call(self, name: str, arguments: str) -> None:
        super()._call(name, arguments)
        self._may_call = not self._exact

    def _give_back(self) -> None:
        text = self._text.span()
        if text.strip(SPACE):
            self._may_call = text.endswith("\n") and not self._exact
        super()._give_back()
