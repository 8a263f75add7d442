"""Calls in answers of every format of the plugin: cut anywhere they are the same, and what is no call is content."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from ssd.errors import UsageError
from ssd.frontend.parsers.tools import ToolCall
from ssd.system import registered
from tests.frontend.parsers.random_calls import (
    Calls,
    Parsed,
    as_json,
    check_bounds,
    check_cuts,
    check_noise,
    copied,
    formats_of,
    parsed,
)

CUTS = 10_000  # in all formats together
FORMATS = formats_of(Path(__file__).parent)
assert FORMATS.keys() == set(registered.names(registered.TOOLS)) - {"hermes", "llama3_json"}


def as_python(name: str, arguments: dict[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def as_xml(random: random.Random, name: str, arguments: dict[str, Any]) -> str:
    space, parts = random.choice(("", "\n")), []
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=random.random() < 0.5)
        parts.append(f"<parameter={key}>\n{text}\n</parameter>{space}")
    call = f"<function={name}>{space}{''.join(parts)}</function>"
    return call if random.random() < 0.2 else f"<tool_call>{space}{call}{space}</tool_call>"


def as_gemma(value: Any, quote: str, keys: str = "") -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, list):
        return f"[{','.join(as_gemma(item, quote, quote) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{keys}{key}{keys}:{as_gemma(item, quote, quote)}' for key, item in value.items())}}}"
    return json.dumps(value)


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_deepseek(space: str, format: str, name: str, arguments: dict[str, Any]) -> str:
    if format == "deepseek_v32":
        given = "".join(
            f'{space}<｜DSML｜parameter name="{key}" string="{json.dumps(isinstance(value, str))}">'
            f"{as_text(value)}</｜DSML｜parameter>"
            for key, value in arguments.items()
        )
        return f'<｜DSML｜invoke name="{name}">{given}{space}</｜DSML｜invoke>'
    text = f"function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```"
    if format == "deepseek_v31":
        text = f"{name}<｜tool▁sep｜>{json.dumps(arguments)}"
    return f"<｜tool▁call▁begin｜>{text}{space}<｜tool▁call▁end｜>"


def written(random: random.Random, format: str, calls: Calls) -> str:
    space = random.choice(("", "\n", " \n"))
    if format == "mistral" and random.random() < 0.5:
        return f"[TOOL_CALLS]{space}[{', '.join(as_json(random, *one) for one in calls)}]"
    if format == "mistral":
        return "".join(
            f"[TOOL_CALLS]{name}{random.choice(('', '[CALL_ID]a-1'))}[ARGS]{json.dumps(arguments)}"
            for name, arguments in calls
        )
    if format == "harmony":
        kind = random.choice(("", " json", " <|constrain|>json", "<|constrain|>json"))
        return space.join(
            f"<|channel|>commentary to=functions.{name}{kind}<|message|>{json.dumps(arguments)}<|call|>"
            for name, arguments in calls
        )
    if format == "qwen3_coder":
        return space.join(as_xml(random, *one) for one in calls)
    if format in ("granite", "phi4_mini_json"):
        opening, closing = (
            ("functools", "")
            if format == "phi4_mini_json"
            else random.choice(
                (("<|tool_call|>", ""), ("<|tool_call|>", "<|/tool_call|>"), ("<tool_call>", "</tool_call>"))
            )
        )
        return f"{opening}[{f',{space}'.join(as_json(random, *one) for one in calls)}]{closing}"
    if format == "internlm":
        marked = (f"{as_json(random, *one, 'parameters')}{space}<|action_end|>" for one in calls)
        return "".join(f"<|action_start|><|plugin|>{space}{one}" for one in marked)
    if format == "glm45":
        return space.join(
            f"<tool_call>{name}{space}"
            + "".join(
                f"<arg_key>{key}</arg_key>{space}<arg_value>{as_text(value)}</arg_value>{space}"
                for key, value in arguments.items()
            )
            + "</tool_call>"
            for name, arguments in calls
        )
    if format.startswith("deepseek"):
        if format == "deepseek_v32":
            kind = random.choice(("function_calls", "tool_calls"))
            opening, closing = f"<｜DSML｜{kind}>", f"</｜DSML｜{kind}>"
        else:
            opening, closing = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
        return opening + space.join(as_deepseek(space, format, *one) for one in calls) + closing
    if format == "kimi_k2":
        each = (
            f"<|tool_call_begin|>functions.{name}:{index}{space}<|tool_call_argument_begin|>{json.dumps(arguments)}"
            for index, (name, arguments) in enumerate(calls)
        )
        inner = "".join(f"{one}<|tool_call_end|>{space}" for one in each)
        return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"
    if format == "functiongemma":
        return "".join(
            f"<start_function_call>call:{name}{as_gemma(arguments, '<escape>')}<end_function_call>"
            for name, arguments in calls
        )
    if format == "gemma4":
        return "".join(
            f"<|tool_call>call:{name}{as_gemma(arguments, f'<|{chr(34)}|>')}<tool_call|>" for name, arguments in calls
        )
    opening, closing = random.choice(
        (("<|python_start|>", "<|python_end|>"), ("<|tool_call_start|>", "<|tool_call_end|>"))
    )
    return f"{opening}[{', '.join(as_python(*one) for one in calls)}]{closing}"


@pytest.mark.parametrize("format", FORMATS)
def test_no_cut_changes_an_answer_and_nothing_is_lost(format: str) -> None:
    check_cuts(format, CUTS // len(FORMATS) // 5, FORMATS[format]["broken"], written)


@pytest.mark.parametrize("format", FORMATS)
def test_noise_is_content_to_the_letter(format: str) -> None:
    check_noise(format, FORMATS[format]["broken"])


ADD = [ToolCall("add", '{"a": 1}')]


@pytest.mark.parametrize(
    ("format", "text", "expected"),
    [
        ("mistral", '[TOOL_CALLS]add{"a": 1}', Parsed("", ADD)),
        ("pythonic", "[add(a=1)]", Parsed("", ADD)),
        ("pythonic", "[add(a=1,),add( a = 1 ) ]", Parsed("", ADD * 2)),
        ("pythonic", "[other(a=1)]", Parsed("[other(a=1)]", [])),
        ("pythonic", "[1, 2]", Parsed("[1, 2]", [])),
        ("pythonic", "So [add(a=1)]", Parsed("So [add(a=1)]", [])),
        ("pythonic", r"[add(a='\x41\u00e9\U0001f642\q', b=(1, None))]", None),
    ],
)
def test_a_format_takes(format: str, text: str, expected: Parsed | None) -> None:
    if expected is None:
        ((_, arguments),) = parsed(format, [text]).calls
        assert json.loads(arguments) == {"a": "Aé🙂\\q", "b": [1, None]}
    else:
        assert parsed(format, [text]) == expected


@pytest.mark.parametrize("deep", ["[", '{"a":'])
@pytest.mark.parametrize("format", FORMATS)
def test_depth_and_length_are_bounded(format: str, deep: str) -> None:
    check_bounds(format, FORMATS[format]["start"], deep)


def test_many_strings_are_not_read_again_for_each() -> None:
    lists = [", ".join(['"x"'] * count) for count in (1000, 2000)]
    few, many = (copied("gemma4", f"<|tool_call>call:add{{a: [{one}]}}<tool_call|>", 1) for one in lists)
    assert many <= 2 * few + 100


def test_a_template_says_its_format() -> None:
    for template, format in (
        ("<tool_call><function={{ name }}>", "qwen3_coder"),
        ("<|channel|>final<|message|>", "harmony"),
        ("{{ '[TOOL_CALLS]' + x }}", "mistral"),
        ("in the format of [func_name1(params_name1=", "pythonic"),
        ("List of tools: <|tool_list_start|>[", "pythonic"),
        ("<tool_call>{{ tc.name }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value></tool_call>", "glm45"),
        ("'<｜tool▁calls▁begin｜>' + '<｜tool▁sep｜>' + name + '```json' + arguments", "deepseek_v3"),
        ("'<｜tool▁calls▁begin｜>' + name + '<｜tool▁sep｜>' + arguments", "deepseek_v31"),
        ("'<｜DSML｜tool_calls>'", "deepseek_v32"),
        ("<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>", "kimi_k2"),
        ("{{ '<start_function_call>call:' }}", "functiongemma"),
        ("{{ '<|tool_call>call:' }}", "gemma4"),
        ("respond with <|tool_call|> followed by a JSON list of tools used", "granite"),
        ("the function calls: functools[{", "phi4_mini_json"),
        ("'<|action_start|><|plugin|>'", "internlm"),
    ):
        assert registered.fitting(registered.TOOLS, template) == format


def test_an_unknown_parser_is_refused_with_those_that_are_there() -> None:
    calls = (
        "--tool-call-parser 'xml': there are auto, none, deepseek_v3, deepseek_v31, deepseek_v32, functiongemma, "
        "gemma4, glm45, granite, harmony, hermes, internlm, kimi_k2, llama3_json, mistral, phi4_mini_json, pythonic, "
        "qwen3_coder"
    )
    thoughts = "--reasoning-parser 'loud': there are auto, none, gemma4, harmony, mistral, think"
    for group, option, name, said in (
        (registered.TOOLS, "--tool-call-parser", "xml", calls),
        (registered.REASONING, "--reasoning-parser", "loud", thoughts),
    ):
        with pytest.raises(UsageError) as error:
            registered.check(group, option, name)
        assert str(error.value) == said


def test_a_template_says_its_marks_of_thoughts() -> None:
    assert registered.fitting(registered.REASONING, "[THINK][/THINK]") == "mistral"
