"""The base class of all formats of calls in a model's answer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeAlias

import msgspec
from msgspec import UNSET, Raw, UnsetType

from ssd.config.params import Structured
from ssd.frontend.parsers.rules import Rules
from ssd.frontend.parsers.source import SPACE, Machine, Malformed, Reading, with_held


class ToolCall(NamedTuple):
    """One call of a tool. `arguments` is the text of a JSON object, as the model wrote it."""

    name: str
    arguments: str


Piece: TypeAlias = str | ToolCall
"""Content or a call, in the order of the answer."""
Offered: TypeAlias = Mapping[str, Mapping[str, Any] | None]
"""The JSON schemas of the arguments of a request's tools, by the tools' names."""

ArgumentCheck: TypeAlias = Callable[[str, str], bool]
"""Tells whether a tool, by its name, may have arguments, a JSON object as text."""


class ToolParser(Machine[Piece]):
    """Finds the calls in one answer, whose text comes in pieces of any size.

    A complete and well-formed call is reported. Everything else, malformed calls with their markers too, is content,
    except white space around calls.

    A subclass writes `parse`. It reads `self._text`, passes text on with `_content` and calls with `_call`.
    `_give_back` makes the text since a malformed call's marker content."""

    special: ClassVar[frozenset[str]] = frozenset()
    """Special tokens of the format. The parsed text must have them."""
    call_marks: ClassVar[Sequence[str]] = ()
    """The marks that begin calls, for the grammar of calls: the first stands there; plain text has none of them."""
    separator: ClassVar[str | None] = None
    """The text between two calls, each with its own mark; None: all calls follow one mark."""

    def __init__(self, offered: Offered, exact: bool = False, obey: ArgumentCheck | None = None) -> None:
        """`exact`: a grammar enforces the format, so no text in another form is a call.

        `obey` tells if the arguments of other calls are right; None: any are."""
        self._offered, self._exact, self._obey = offered, exact, obey
        self._held: list[str] = []  # white space that is left out if a call follows
        self._has_called = self._has_said = False
        super().__init__()

    @classmethod
    @abstractmethod
    def fits(cls, template: str) -> bool:
        """Return True if a model with a chat template of this text calls tools in this format."""

    @classmethod
    def turns(cls, conversation: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
        """Return a conversation in OpenAI's format as a chat template of the format takes it."""
        return conversation

    @classmethod
    def forced(cls, rules: Rules) -> str:
        """Return the grammar expression of an answer of calls only; "" if there is none. Raises Unfit."""
        if not cls.call_marks:
            return ""
        marked = f"{rules.marker(cls.call_marks[0])} {cls.after_mark(rules)}"
        return marked if cls.separator is None else rules.repeated(marked, rules.text(cls.separator))

    @classmethod
    def allowed(cls, rules: Rules) -> str:
        """Return the grammar expression of an answer whose calls are well-formed, or "". Raises Unfit."""
        if not cls.call_marks:
            return ""
        return rules.calls_in_text(cls.call_marks[0], cls.after_mark(rules), rules.plain(cls.call_marks))

    @classmethod
    def after_mark(cls, rules: Rules) -> str:
        """Return the grammar expression of what follows the mark, for formats with `call_marks`."""
        raise NotImplementedError

    @classmethod
    def calls_or_answer(cls, rules: Rules, asked: Structured) -> str:
        """Return the grammar expression of calls only, or else an answer in JSON; "" if there is none.

        Raises Unfit for a tool, RequestError for a schema that is none."""
        calls = cls.forced(rules)
        return calls and rules.any_of([calls, f"{cls.before_answer(rules)} {rules.value(asked)}"])

    @classmethod
    def before_answer(cls, rules: Rules) -> str:
        """Return the grammar expression of the mark before an answer without calls; "" for none."""
        return ""

    @abstractmethod
    def parse(self) -> Reading[None]:
        """Read the answer, as a generator. Text that it does not read is content."""

    def finish(self) -> list[Piece]:
        self._advance("", ended=True)
        if not self._has_called and (held := "".join(self._held)):
            self._pieces.append(held)
        return self._new()

    def _parse(self) -> Reading[None]:
        yield from self.parse()
        yield from self._content()

    # -- for subclasses ---------------------------------------------------------------------------------------------

    def _content(self, *markers: str) -> Reading[str]:
        return (yield from self._text.until(markers, self._say))

    def _say(self, text: str) -> None:
        certain = with_held(self._held, text)
        if certain:
            if self._has_called and not self._has_said:
                certain = certain.lstrip(SPACE)
            self._pieces.append(certain)
            self._has_said = True

    def _give_back(self) -> None:
        self._say(self._text.span())
        self._text.mark()

    def _call(self, name: str, arguments: str) -> None:
        self._pieces.append(ToolCall(name, arguments))
        self._has_called = True
        self._held.clear()
        self._text.mark()

    def _json_call(self, known: Container[str] | None = None) -> Reading[None]:
        """Read an object and report the call. Raises Malformed, also for a name not among the `known` ones."""
        try:
            call = _OBJECT.decode((yield from self._text.json_object()))
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            raise Malformed from None
        given = call.parameters if call.arguments is UNSET else call.arguments
        if not call.name or (known is not None and call.name not in known):
            raise Malformed
        self._call(call.name, "{}" if given is UNSET else object_in(bytes(given).decode()))

    def _marked_calls(self, one: Callable[[str], Reading[None]], *marks: str) -> Reading[None]:
        """Read content and calls; `one` reads and reports a call after its mark."""
        while mark := (yield from self._content(*marks)):
            try:
                yield from one(mark)
            except Malformed:
                self._give_back()

    def _blocks(self, ends: Mapping[str, str], call: str, one: Callable[[], Reading[None]]) -> Reading[None]:
        """Read content and blocks of calls: a mark in `ends` begins a block, and its value ends it.

        `one` reads a call after its mark `call`, which may be in `ends` too."""

        def block(mark: str) -> Reading[None]:
            if mark != call:
                yield from self._text.skip_space()
                yield from self._text.expect(call)
            more = True
            while more:
                yield from one()
                yield from self._text.skip_space()
                more = yield from self._text.accept(call)
            yield from self._drop(ends[mark])

        yield from self._marked_calls(block, *ends)

    def _drop(self, marker: str) -> Reading[bool]:
        """Leave out the marker after a call and return True; before other text white space is content."""
        yield from self._text.skip_space()
        found = yield from self._text.accept(marker)
        if found:
            self._held.clear()
            self._text.mark()
        else:
            self._give_back()
        return found


def object_in(text: str) -> str:
    """Return a JSON object, perhaps out of a JSON string. Raises Malformed."""
    if not text.startswith("{"):
        try:
            text = msgspec.json.decode(text, type=str)
            msgspec.json.decode(text, type=dict)
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            raise Malformed from None
    return text.strip(SPACE)


class _Object(msgspec.Struct):
    name: str
    arguments: Raw | UnsetType = UNSET
    parameters: Raw | UnsetType = UNSET


_OBJECT = msgspec.json.Decoder(_Object)
