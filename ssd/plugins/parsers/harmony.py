"""Harmony, the format of gpt-oss: an answer is messages, each with a channel and perhaps a recipient.

`HarmonyThoughts` takes away all headers but those of calls, which `HarmonyCalls` reads."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ssd.frontend.parsers.reasoning import ReasoningParser
from ssd.frontend.parsers.rules import Rules
from ssd.frontend.parsers.source import Malformed, Reading, Source
from ssd.frontend.parsers.tools import ToolParser

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_ENDS = (_END, _CALL, _RETURN)
_TO, _FUNCTIONS = "to=", "functions."
_WORD = re.compile(r"[^\s<]*")


def _header(text: Source, mark: str) -> Reading[tuple[str, str]]:
    """Read the header of a message after `mark`, its first mark; return channel and recipient.

    A header has `<|channel|>` with a channel, `to=` with a recipient, both or neither, then perhaps `<|constrain|>`
    with a type, whose mark may be missing, and `<|message|>`. Raises Malformed."""
    found = {_CHANNEL: (yield from text.take(_WORD))} if mark == _CHANNEL else {}
    while all(found.values()):
        yield from text.skip_space()
        mark = ""
        for one in (_CHANNEL, _TO, _CONSTRAIN, _MESSAGE):
            if (yield from text.accept(one)):
                mark = one
                break
        if mark == _MESSAGE:
            return found.get(_CHANNEL, ""), found.get(_TO, "")
        if mark in found or (not mark and _CHANNEL not in found):
            break
        found[mark] = yield from text.take(_WORD)
    raise Malformed


class HarmonyThoughts(ReasoningParser):
    """`<|channel|>analysis<|message|>...<|end|>` and messages to tools of the server are thoughts.

    Messages to `functions.` are calls, all others content. Line breaks divide thoughts, and contents. Unless the prompt
    ends with `<|start|>assistant`, the answer begins inside of a content."""

    opening, closing = "<|start|>assistant", _END
    special = frozenset({_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS})

    @classmethod
    def fits(cls, template: str) -> bool:
        return _CHANNEL in template and _MESSAGE in template

    @classmethod
    def turn(cls, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with its thoughts, and content beside a call, as `thinking`, for the template."""
        thinking = message.pop("reasoning_content", "")
        if message.get("tool_calls"):
            thinking = "\n".join(filter(None, [thinking, message["content"]]))
            message["content"] = ""
        return message | ({"thinking": thinking} if thinking else {})

    @classmethod
    def before(cls, rules: Rules, opened: bool, calls: bool) -> str:
        if not opened:
            return ""
        channel, message = rules.marker(_CHANNEL), rules.marker(_MESSAGE)
        thoughts = f'({channel} "analysis" {message} {_rest_of_message(rules)})*'
        return thoughts if calls else f'{thoughts} {channel} "final" {message}'

    def _parse(self) -> Reading[None]:
        text = self._text
        self._gaps: dict[Callable[[str], None], str] = {self._think: "", self._answer: ""}
        receive, mark = self._say(self._answer), _START if self._opened else ""
        while True:
            if mark in (_START, _CHANNEL):
                try:
                    receive = self._begun(*(yield from _header(text, mark)))
                except Malformed:
                    if (yield from text.peek()):  # the beginning of a header at the end says nothing
                        receive(text.span())
            elif mark:
                receive = self._say(self._answer)
            mark = yield from text.until((_START, _CHANNEL, *_ENDS), receive)
            if not mark:
                return
            if mark == _START:
                yield from text.take(_WORD)  # the role

    def _begun(self, channel: str, recipient: str) -> Callable[[str], None]:
        if recipient.startswith(_FUNCTIONS):
            self._answer(f"{_CHANNEL}commentary {_TO}{recipient}{_MESSAGE}")
            return self._answer
        self._held.clear()
        return self._say(self._think if recipient or channel == "analysis" else self._answer)

    def _say(self, pass_on: Callable[[str], None]) -> Callable[[str], None]:
        gap = self._gaps[pass_on]

        def receive(text: str) -> None:
            nonlocal gap
            pass_on(gap + text)
            gap, self._gaps[pass_on] = "", "\n"

        return receive


class HarmonyCalls(ToolParser):
    """`<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`: gpt-oss.

    A turn ends after its call."""

    special = frozenset({_CHANNEL, _MESSAGE, _CONSTRAIN, _CALL})

    @classmethod
    def fits(cls, template: str) -> bool:
        return HarmonyThoughts.fits(template)

    @classmethod
    def forced(cls, rules: Rules) -> str:
        return f'{rules.marker(_CHANNEL)} "commentary" {cls._after_channel(rules)}'

    @classmethod
    def allowed(cls, rules: Rules) -> str:
        channel, message = rules.marker(_CHANNEL), rules.marker(_MESSAGE)
        said = f'{channel} ("commentary" | "analysis") {message} {_rest_of_message(rules)}'
        final = f'({channel} "final" {message})? {_plain(rules)}'
        return f"({said})* ({cls.forced(rules)} | {final})"

    @classmethod
    def before_answer(cls, rules: Rules) -> str:
        return f'{rules.marker(_CHANNEL)} "final" {rules.marker(_MESSAGE)}'

    @classmethod
    def _after_channel(cls, rules: Rules) -> str:
        kind = f'{rules.marker(_CONSTRAIN)} "json" {rules.marker(_MESSAGE)}'
        before = f" {_TO}{_FUNCTIONS}"
        return rules.any_of(
            [f"{rules.name(each, before, ' ')} {kind} {rules.arguments(each)}" for each in rules.functions]
        )

    def parse(self) -> Reading[None]:
        yield from self._marked_calls(self._one, _CHANNEL)

    def _one(self, mark: str) -> Reading[None]:
        _, recipient = yield from _header(self._text, mark)
        name = recipient.removeprefix(_FUNCTIONS)
        if name in ("", recipient):
            raise Malformed
        yield from self._text.skip_space()
        self._call(name, (yield from self._text.json_object()))
        yield from self._drop(_CALL)


def _plain(rules: Rules) -> str:
    return rules.plain([_START, _CHANNEL, _END])


def _rest_of_message(rules: Rules) -> str:
    return f'{rules.up_to(_END, _plain(rules))} {rules.marker(_START)} "assistant"'
