"""Calls in JSON, between the marks of their format or as models write them without.

**The rule of bare calls.** A call without a mark is read at the beginning of the answer or of a line, and after another
call. It is an object with the name of a tool of the request, under `name` or `function`, and an object of arguments,
under `arguments` or `parameters`, perhaps in a string. Only `id` and `type` may be beside them. `function` may be an
object with `name` and `arguments`. Several objects follow each other, with `;`, `,` or white space between, or are a
list. A fence (three backquotes, perhaps with a word such as `json`) and a tag (`<tools>`) may be around them and vanish
with them.

Text that may become a call is held back until it cannot. In a fence with other text there are no bare calls. Marks of a
format begin calls anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

from ssd.frontend.parsers.source import SPACE, Malformed, Reading
from ssd.frontend.parsers.tools import ArgumentCheck, Offered, ToolParser, object_in

_TAGS = {f"<{name}>": f"</{name}>" for name in ("tools", "tool_call", "function_call")}
_CALL_END = "</tool_call>"
_WORDS = ("json", "tool_calls", "tool_call", "tool_code", "tools", "function_call", "xml")
_LABELS = (*(form for word in _WORDS for form in (word, word.upper(), word.capitalize())), "")
_FENCE = "```"
_STARTS = ("\n{", "\n[", "\n<", f"\n{_FENCE}")
_TICKS = re.compile("`*")
_BLANK = re.compile(r"[ \t]*")
_IN_FUNCTION = {'"name"': "name", '"arguments"': "arguments"}
_KEYS = {**_IN_FUNCTION, '"function"': "name", '"parameters"': "arguments", '"id"': "id", '"type"': "type"}
"""The keys of a call, with the part of it that each gives."""


class JsonCalls(ToolParser):
    """Base of the formats whose calls are objects. Between the `marks`, an object may name any tool."""

    marks: ClassVar[Mapping[str, str]]
    """The marks before calls, each with the one after them; "" for none."""
    prefix: ClassVar[str] = ""
    """A word that may stand before a list of bare calls."""
    unmarked: ClassVar[bool] = False
    """True if calls without a mark, at the beginning of an answer, are the format's own."""

    def __init__(self, offered: Offered, exact: bool = False, obey: ArgumentCheck | None = None) -> None:
        super().__init__(offered, exact, obey)
        self._may_call = self.unmarked or not exact  # here begins a line or the answer, or a call ended
        self._fence = ""  # the backquotes around the text that comes
        self._starts = (*_STARTS, f"\n{self.prefix}") if self.prefix else _STARTS
        self._names = {json.dumps(name, ensure_ascii=ascii): name for name in offered for ascii in (True, False)}

    def parse(self) -> Reading[None]:
        while mark := (yield from self._bare_calls(*self.marks)):
            yield from self._text.skip_space()
            try:
                fence = "" if self._exact else (yield from self._fence_begin())
                yield from self._marked()
            except Malformed:
                self._give_back()
            else:
                yield from self._close(fence, self.marks[mark])

    def _marked(self) -> Reading[None]:
        yield from self._calls(self._json_call)

    def _bare_calls(self, *marks: str) -> Reading[str]:
        """Read content and bare calls up to the format's first mark; return the mark, "" at the end."""
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
            starts = () if self._exact else (_FENCE,) if self._fence else self._starts
            mark = yield from self._content(*marks, *starts)
            if mark not in starts:
                return mark
            self._text.back(len(mark.lstrip("\n")))
            self._may_call = True

    def _bare(self) -> Reading[None]:
        """Read calls, and what is around them. Raises Malformed where no call comes."""
        closings = [] if self._exact else (yield from self._around())
        if self.prefix and not self._exact and (yield from self._text.accept(self.prefix)):
            if (yield from self._text.peek()) != "[":
                raise Malformed
            yield from self._calls(partial(self._json_call, self._offered))
        else:
            yield from self._calls(self._bare_call)
        yield from self._close(*closings)

    def _around(self) -> Reading[list[str]]:
        """Read fence and tag before calls; return what ends them, the inner one first. Raises Malformed."""
        closings: list[str] = []
        for _ in range(2):
            if not (closing := (yield from self._fence_begin())):
                tag = yield from self._text.one_of((*_TAGS, ""))
                closing = _TAGS.get(tag, "")
                yield from self._text.skip_space()
            closings.insert(0, closing)
        if not any(closing in _TAGS.values() for closing in closings):
            closings.insert(0, _CALL_END)  # models forget the opening tag
        return closings

    def _fence_begin(self) -> Reading[str]:
        """Read the line that begins a fence; return its backquotes, "" for none. Raises Malformed."""
        fence = "" if self._fence else (yield from self._text.take(_TICKS))
        if 0 < len(fence) < len(_FENCE):
            raise Malformed
        if fence:
            self._fence = fence
            yield from self._text.one_of(_LABELS)
            yield from self._text.skip_space()
        return fence

    def _close(self, *closings: str) -> Reading[None]:
        for closing in filter(None, closings):
            if (yield from self._drop(closing)) and closing == self._fence:
                self._fence = ""

    def _fence_end(self) -> Reading[None]:
        """Read the backquotes of a line if they end the fence. Raises Malformed, since they are content."""
        ticks = yield from self._text.take(_TICKS)
        yield from self._text.take(_BLANK)
        if len(ticks) >= len(self._fence) and (yield from self._text.peek()) in ("", "\r", "\n"):
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
        found = yield from self._called(_KEYS)
        if self._obey is not None and not self._obey(found["name"], found["arguments"]):
            raise Malformed
        self._call(found["name"], found["arguments"])

    def _called(self, keys: Mapping[str, str]) -> Reading[dict[str, str]]:
        """Read an object with some of these keys; return its parts. Raises Malformed."""
        found: dict[str, str] = {}
        yield from self._text.expect("{")
        while True:
            yield from self._text.skip_space()
            part = keys[key := (yield from self._text.one_of(keys))]
            if part in found:
                raise Malformed
            yield from self._text.separator(":")
            if key == '"function"' and "arguments" not in found and (yield from self._text.peek()) == "{":
                found |= yield from self._called(_IN_FUNCTION)
            elif part == "name":
                found[part] = self._names[(yield from self._text.one_of(self._names))]
            elif part == "arguments":
                found[part] = object_in((yield from self._text.json_object(beginning='{"')))
            else:
                found[part] = yield from self._text.json_object(beginning='"')
            yield from self._text.skip_space()
            if (yield from self._text.accept("}")):
                break
            yield from self._text.expect(",")
        if not {"name", "arguments"} <= found.keys():
            raise Malformed
        return found

    def _call(self, name: str, arguments: str) -> None:
        super()._call(name, arguments)
        self._may_call = not self._exact

    def _give_back(self) -> None:
        text = self._text.span()
        if text.strip(SPACE):
            self._may_call = text.endswith("\n") and not self._exact
        super()._give_back()
