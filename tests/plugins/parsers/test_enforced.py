"""Answers that the grammar of a format allows, drawn at random: its parser reads valid calls out of each."""

from __future__ import annotations

import pytest

from ssd.frontend.parsers.rules import CallableFunction
from tests.frontend.parsers.enforced import check_allowed, check_beside_a_schema, check_forced, check_unfit, forms

MARKERS = {
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "pythonic": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "harmony": ("<|channel|>", "<|constrain|>", "<|message|>", "<|start|>", "<|end|>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "granite": ("<|tool_call|>",),
    "glm45": ("<tool_call>", "</tool_call>"),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
}
BAD = {
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]',
    "pythonic": "[add(a=1)]",
    "harmony": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
    "granite": '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]',
    "glm45": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "deepseek_v31": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>'
    ),
}


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize(("format", "markers"), forms(MARKERS))
def test_what_is_forced_is_calls_and_nothing_else(format: str, markers: tuple[str, ...], several: bool) -> None:
    check_forced(format, markers, several)


@pytest.mark.parametrize(("format", "markers"), forms(MARKERS))
def test_what_is_allowed_is_text_and_calls_that_obey(format: str, markers: tuple[str, ...]) -> None:
    check_allowed(format, markers, BAD[format])


@pytest.mark.parametrize(("format", "markers"), forms(MARKERS))
def test_beside_a_schema_an_answer_is_calls_or_obeys_it(format: str, markers: tuple[str, ...]) -> None:
    check_beside_a_schema(format, markers, "<|channel|>final<|message|>" if format == "harmony" else "")


@pytest.mark.parametrize(
    "function",
    [
        CallableFunction("f", {"anyOf": [{"required": ["a"]}]}, False),
        CallableFunction("f", {"properties": {"not a name": {}}}, False),
        CallableFunction("f", {"properties": {}, "required": ["a"]}, False),
        CallableFunction("f", {"properties": []}, False),
        CallableFunction("f g", None, False),
    ],
)
def test_what_a_format_cannot_say_is_refused_by_name(function: CallableFunction) -> None:
    check_unfit("pythonic", function)
