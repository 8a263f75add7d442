"""Calls of tools in a model's answer: the base class of all formats, and the formats made of JSON.

Sources of the formats: the model cards of Hermes and Qwen, Meta's "prompt formats" for Llama, and the documentation of
Mistral's tokenizers."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, TypeAlias

import msgspec
from msgspec import UNSET, Raw, UnsetType

from ssd.config.params import Structured
from ssd.frontend.parsers.rules import Rules
from ssd.frontend.parsers.source import SPACE, Machine, Malformed, Reading

_NAME = re.compile(r"[\w.-]*")
_ID = re.compile(r"[\w-]*")
_OBJECT_BEGINS = r'\s*\{\s*"name"'


class ToolCall(NamedTuple):
    """One call of a tool. `arguments` is the text of a JSON object, as the model wrote it."""

    name: str
    arguments: str


Piece: TypeAlias = str | ToolCall
"""Content or a call, in the order of the answer."""
Offered: TypeAlias = Mapping[str, Mapping[str, Any] | None]
"""The JSON schemas of the arguments of a request's tools, by the tools' names."""


class ToolParser(Machine):
    """Finds the calls in one answer, whose text comes in pieces of any size.

    A call is reported once it is complete and well-formed. Everything else is content, malformed and unfinished calls
    with their markers too. Only white space around calls, and the markers of reported calls, are left out.

    A subclass writes `parse`. It reads `self._text` with the methods of `Source`, passes text on with `_content` and
    calls with `_call`. For a malformed call, `_give_back` makes the text read since its marker content."""

    special: ClassVar[frozenset[str]] = frozenset()
    """Special tokens of the format. The parsed text must have them."""

    def __init__(self, offered: Offered) -> None:
        self._offered = offered
        self._pieces: list[Piece] = []
        self._held = ""  # white space that is left out if a call follows
        self._has_called = self._has_said = False
        super().__init__()

    @classmethod
    @abstractmethod
    def fits(cls, template: str) -> bool:
        """Return True if a chat template with this text belongs to a model that calls tools in this format."""

    @classmethod
    def forced(cls, rules: Rules) -> str:
        """Return the grammar expression of an answer that consists of calls only; "" if the format has none.

        Raises Unfit for tools that cannot be called."""
        return ""

    @classmethod
    def allowed(cls, rules: Rules) -> str:
        """Return the grammar expression of an answer whose calls, if any, are well-formed; "" if the format has none.

        Raises Unfit for tools that cannot be called."""
        return ""

    @classmethod
    def instead(cls, rules: Rules, asked: Structured) -> str:
        """Return the grammar expression of calls only, or else an answer in JSON; "" if the format has none.

        Raises Unfit for tools that cannot be called, RequestError for a schema that is none."""
        calls = cls.forced(rules)
        return calls and rules.any_of([calls, f"{cls.before_answer(rules)} {rules.value(asked)}"])

    @classmethod
    def before_answer(cls, rules: Rules) -> str:
        """Return the grammar expression of the mark before an answer without calls; "" for none."""
        return ""

    @abstractmethod
    def parse(self) -> Reading[None]:
        """Read the answer, as a generator. Text that it does not read is content."""

    def feed(self, text: str) -> list[Piece]:
        """Return the content and calls that are certain after this piece and were not returned before."""
        self._advance(text, ended=False)
        return self._new()

    def finish(self) -> list[Piece]:
        """Return the content and calls still held back, since no text follows."""
        self._advance("", ended=True)
        if self._held and not self._has_called:
            self._pieces.append(self._held)
        return self._new()

    def _parse(self) -> Reading[None]:
        yield from self.parse()
        yield from self._content()

    def _new(self) -> list[Piece]:
        new, self._pieces = self._pieces, []
        return new

    # -- for subclasses ---------------------------------------------------------------------------------------------

    def _content(self, *markers: str) -> Reading[str]:
        """Pass text on up to the first marker, begin a span there, and return the marker; "" at the end."""
        return (yield from self._text.until(markers, self._say))

    def _say(self, text: str) -> None:
        """Pass text on as content; hold white space back until more content follows."""
        text = self._held + text
        certain = text.rstrip(SPACE)
        self._held = text[len(certain) :]
        if certain:
            if self._has_called and not self._has_said:
                certain = certain.lstrip(SPACE)
            self._pieces.append(certain)
            self._has_said = True

    def _give_back(self) -> None:
        """Make the span content."""
        self._say(self._text.span())
        self._text.mark()

    def _call(self, name: str, arguments: str) -> None:
        """Report a call; drop the span."""
        self._pieces.append(ToolCall(name, arguments))
        self._has_called, self._held = True, ""
        self._text.mark()

    def _json_call(self, known: bool = False) -> Reading[None]:
        """Read an object with `name` and `arguments` or `parameters`, and report the call.

        With `known`, it must have arguments and name a tool of the request. Raises Malformed."""
        text = yield from self._text.json_object()
        try:
            call = _OBJECT.decode(text)
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            raise Malformed from None
        given = call.parameters if call.arguments is UNSET else call.arguments
        if known and (given is UNSET or call.name not in self._offered):
            raise Malformed
        arguments = "{}" if given is UNSET else bytes(given).decode()
        if not arguments.startswith("{") or not call.name:
            raise Malformed
        self._call(call.name, arguments)

    def _drop(self, marker: str) -> Reading[None]:
        """Leave out the marker after a call; if other text comes, make the white space before it content."""
        yield from self._text.skip_space()
        if (yield from self._text.accept(marker)):
            self._text.mark()
        else:
            self._give_back()


class _Object(msgspec.Struct):
    name: str
    arguments: Raw | UnsetType = UNSET
    parameters: Raw | UnsetType = UNSET


_OBJECT = msgspec.json.Decoder(_Object)


class Hermes(ToolParser):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, each call by itself: Hermes, Qwen 2.5 and 3."""

    special = frozenset({"<tool_call>", "</tool_call>"})

    @classmethod
    def fits(cls, template: str) -> bool:
        others = ("<function=", "<arg_key>", "<parameter=")  # Qwen3-Coder's and GLM's calls are not JSON
        return "<tool_call>" in template and not any(other in template for other in others)

    @classmethod
    def forced(cls, rules: Rules) -> str:
        return rules.repeated(f"{rules.marker('<tool_call>')} {cls._marked(rules)}", rules.text("\n"))

    @classmethod
    def allowed(cls, rules: Rules) -> str:
        return rules.calls_in_text("<tool_call>", cls._marked(rules), rules.plain(["<tool_call>"]))

    @classmethod
    def _marked(cls, rules: Rules) -> str:
        """Return the expression of the text after the mark of a call."""
        return rules.any_of([f'"\\n" {rules.json_calls("arguments")} "\\n" {rules.marker("</tool_call>")}'])

    def parse(self) -> Reading[None]:
        while (yield from self._content("<tool_call>")):
            yield from self._text.skip_space()
            try:
                yield from self._json_call()
            except Malformed:
                self._give_back()
            else:
                yield from self._drop("</tool_call>")


class Llama3Json(ToolParser):
    """`{"name": ..., "parameters": {...}}` as the whole answer, or after `<|python_tag|>`: Llama 3.1 to 3.3.

    Several calls have `;` between them. Without the tag, an object is a call only if it names a tool of the request."""

    special = frozenset({"<|python_tag|>"})

    @classmethod
    def fits(cls, template: str) -> bool:
        return '{"name": function name, "parameters": dictionary' in template

    @classmethod
    def forced(cls, rules: Rules) -> str:
        return rules.repeated(rules.json_calls("parameters"), rules.text("; "))

    @classmethod
    def allowed(cls, rules: Rules) -> str:
        return f"{cls.forced(rules)} | {rules.plain(['<|python_tag|>'], _OBJECT_BEGINS)}"

    @classmethod
    def instead(cls, rules: Rules, asked: Structured) -> str:
        calls = rules.repeated(rules.json_calls_as_values("parameters"), rules.text("; "))
        return rules.any_of([calls, rules.value(asked)])

    def parse(self) -> Reading[None]:
        tagged = ""
        while True:
            try:
                yield from self._list(known=not tagged)
            except Malformed:
                self._give_back()
            tagged = yield from self._content("<|python_tag|>")
            if not tagged:
                return

    def _list(self, known: bool) -> Reading[None]:
        while True:
            yield from self._text.skip_space()
            yield from self._json_call(known)
            yield from self._text.skip_space()
            if not (yield from self._text.accept(";")):
                self._give_back()
                return


class Mistral(ToolParser):
    """`[TOOL_CALLS]` and a list of objects with `name` and `arguments`: Mistral.

    Newer models write `[TOOL_CALLS]name[ARGS]{...}` for each call."""

    special = frozenset({"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"})

    @classmethod
    def fits(cls, template: str) -> bool:
        return "[TOOL_CALLS]" in template

    @classmethod
    def forced(cls, rules: Rules) -> str:
        marked = rules.any_of([f"{rules.marker('[TOOL_CALLS]')} {cls._marked(rules)}"])
        return rules.repeated(marked, "") if rules.knows("[ARGS]") else marked

    @classmethod
    def allowed(cls, rules: Rules) -> str:
        return rules.calls_in_text("[TOOL_CALLS]", cls._marked(rules), rules.plain(["[TOOL_CALLS]"]))

    @classmethod
    def _marked(cls, rules: Rules) -> str:
        """Return the expression of the text after the mark: a list, or one call for a newer tokenizer."""
        if not rules.knows("[ARGS]"):
            return rules.any_of([f'"[" {rules.repeated(rules.json_calls("arguments"), rules.text(", "))} "]"'])
        args = rules.marker("[ARGS]")
        return rules.any_of([f"{rules.name(each)} {args} {rules.arguments(each)}" for each in rules.functions])

    def parse(self) -> Reading[None]:
        while (yield from self._content("[TOOL_CALLS]")):
            yield from self._text.skip_space()
            try:
                if (yield from self._text.accept("[")):
                    yield from self._list()
                else:
                    yield from self._named()
            except Malformed:
                self._give_back()

    def _list(self) -> Reading[None]:
        while True:
            yield from self._text.skip_space()
            yield from self._json_call()
            yield from self._text.skip_space()
            if (yield from self._text.accept("]")):
                self._text.mark()
                return
            yield from self._text.expect(",")

    def _named(self) -> Reading[None]:
        name = yield from self._text.take(_NAME)
        if (yield from self._text.accept("[CALL_ID]")):
            yield from self._text.take(_ID)
        yield from self._text.accept("[ARGS]")
        yield from self._text.skip_space()
        arguments = yield from self._text.json_object()
        if not name:
            raise Malformed
        self._call(name, arguments)
