"""Formats whose calls are JSON, by the model cards and the documentation of Mistral's tokenizers; its thoughts."""

from __future__ import annotations

import re
from typing import ClassVar

from ssd.frontend.parsers.bare import JsonCalls
from ssd.frontend.parsers.reasoning import ReasoningParser
from ssd.frontend.parsers.rules import Rules
from ssd.frontend.parsers.source import NAME, Malformed, Reading

_ID = re.compile(r"[\w-]*")


class MistralCalls(JsonCalls):
    """`[TOOL_CALLS]` and a list of objects with `name` and `arguments`: Mistral.

    Newer models write `[TOOL_CALLS]name[ARGS]{...}` for each call."""

    special = frozenset({"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"})
    marks: ClassVar = {"[TOOL_CALLS]": ""}
    call_marks = ("[TOOL_CALLS]",)

    @classmethod
    def fits(cls, template: str) -> bool:
        return "[TOOL_CALLS]" in template

    @classmethod
    def forced(cls, rules: Rules) -> str:
        marked = rules.any_of([super().forced(rules)])
        return rules.repeated(marked, "") if rules.knows("[ARGS]") else marked

    @classmethod
    def after_mark(cls, rules: Rules) -> str:
        if not rules.knows("[ARGS]"):
            return rules.any_of([f'"[" {rules.repeated(rules.json_calls("arguments"), rules.text(", "))} "]"'])
        args = rules.marker("[ARGS]")
        return rules.any_of([f"{rules.name(each)} {args} {rules.arguments(each)}" for each in rules.functions])

    def _marked(self) -> Reading[None]:
        if (yield from self._text.peek()) in ("[", "{"):
            yield from super()._marked()
        else:
            yield from self._named()

    def _named(self) -> Reading[None]:
        name = yield from self._text.take(NAME)
        if (yield from self._text.accept("[CALL_ID]")):
            yield from self._text.take(_ID)
        yield from self._text.accept("[ARGS]")
        yield from self._text.skip_space()
        arguments = yield from self._text.json_object()
        if not name:
            raise Malformed
        self._call(name, arguments)


class MistralThink(ReasoningParser):
    """`[THINK]...[/THINK]`: Magistral."""

    opening, closing = "[THINK]", "[/THINK]"


class GraniteCalls(JsonCalls):
    """`<|tool_call|>[{"name": ..., "arguments": {...}}]`: Granite 3, Phi 4 mini (with a mark at the end).

    Granite 4 writes as Hermes does, Granite 3.1 a list after `<tool_call>`."""

    special = frozenset({"<|tool_call|>", "<|/tool_call|>", "<tool_call>", "</tool_call>"})
    marks: ClassVar = {"<|tool_call|>": "<|/tool_call|>", "<tool_call>": "</tool_call>"}
    call_marks = ("<|tool_call|>", "<tool_call>")

    @classmethod
    def fits(cls, template: str) -> bool:
        return "<|tool_call|>" in template

    @classmethod
    def after_mark(cls, rules: Rules) -> str:
        return rules.any_of([f'"[" {rules.repeated(rules.json_calls("arguments"), rules.text(", "))} "]"'])


class Phi4Mini(JsonCalls):
    """`functools[{"name": ..., "arguments": {...}}]`: Phi 4 mini with the chat template of vLLM.

    The word is plain text: it begins a line, and the calls name tools of the request."""

    marks: ClassVar = {}
    prefix = "functools"

    @classmethod
    def fits(cls, template: str) -> bool:
        return "functools[" in template


class InternLM(JsonCalls):
    """`<|action_start|><|plugin|>{"name": ..., "parameters": {...}}<|action_end|>`: InternLM 2.5 and 3."""

    special = frozenset({"<|action_start|>", "<|plugin|>", "<|action_end|>"})
    marks: ClassVar = {"<|action_start|><|plugin|>": "<|action_end|>", "<|action_start|> <|plugin|>": "<|action_end|>"}

    @classmethod
    def fits(cls, template: str) -> bool:
        return "<|plugin|>" in template
