"""The two commonest formats whose calls are JSON."""

from __future__ import annotations

from typing import ClassVar

from ssd.config.params import Structured
from ssd.frontend.parsers.bare import JsonCalls
from ssd.frontend.parsers.rules import Rules

_OBJECT_BEGINS = r'\s*\{\s*"name"'


class Hermes(JsonCalls):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>` for each call: Hermes, Qwen 2.5 and 3."""

    special = frozenset({"<tool_call>", "</tool_call>"})
    marks: ClassVar = {"<tool_call>": "</tool_call>"}
    call_marks = ("<tool_call>",)
    separator = "\n"

    @classmethod
    def fits(cls, template: str) -> bool:
        others = ("<function=", "<arg_key>", "<parameter=")  # Qwen3-Coder's and GLM's calls are not JSON
        return "<tool_call>" in template and not any(other in template for other in others)

    @classmethod
    def after_mark(cls, rules: Rules) -> str:
        return rules.any_of([f'"\\n" {rules.json_calls("arguments")} "\\n" {rules.marker("</tool_call>")}'])


class Llama3Json(JsonCalls):
    """`{"name": ..., "parameters": {...}}` as the whole answer, or after `<|python_tag|>`: Llama 3.

    Several calls have `;` between them."""

    special = frozenset({"<|python_tag|>"})
    marks: ClassVar = {"<|python_tag|>": ""}
    unmarked = True

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
    def calls_or_answer(cls, rules: Rules, asked: Structured) -> str:
        calls = rules.repeated(rules.json_calls_as_values("parameters"), rules.text("; "))
        return rules.any_of([calls, rules.value(asked)])
