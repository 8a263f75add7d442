"""Calls in answers of every format: cut anywhere they are the same, and what is no call is content."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ssd.errors import UsageError
from ssd.frontend.parsers.source import MAX_DEPTH, Source
from ssd.frontend.parsers.tools import Piece, ToolCall, ToolParser
from ssd.system import registered

CUTS = 10_000  # in all formats together
FORMATS = registered.names(registered.TOOLS)
ANY = {"type": ["string", "number", "boolean", "null", "object", "array"]}
OFFERED = {name: {"properties": dict.fromkeys(("a", "city", "text_2"), ANY)} for name in ("get_weather", "add")}
OFFERED["note.write"] = OFFERED["add"]

TEXTS = ("", "Let me see.\n", "So it is {almost} [done]; <b>\n\n", "日本語 🙂 ", "a < b <tool> [TOOL] <|python \n")
STRINGS = (
    "",
    "Paris",
    'he said "no" \\ and\n\tleft',
    "</tool_call><tool_call>",
    "[TOOL_CALLS][ARGS]{",
    "<|python_tag|>; {}",
    "日本🙂é",
    "it's (f(a=1)]",
    "}{][",
)
BROKEN = {
    "harmony": (
        "<|channel|>",
        "<|channel|>commentary<|message|>",
        "<|channel|>commentary to=functions.add<|message|>[1]<|call|>",
        "<|channel|>commentary to=functions.<|message|>{}",
        "<|channel|>commentary to=add<|message|>{}<|call|>",
        '<|channel|>commentary to=functions.add json<|message|>{"a": 1',
        "<|channel|>commentary to=functions.add json json<|message|>{}",
    ),
    "qwen3_coder": (
        "<tool_call>.",
        "<tool_call><tool_call>.",
        '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>',
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<function=other>\n</function>",
        '<tool_call>\n<function=add>\n{"a": 1}\n</function>\n</tool_call>',
        "<function=add\n>",
    ),
    "hermes": (
        '<tool_call>{"name": "add", "arguments": {"a": 1}',
        '<tool_call>{"name": "add", "arguments": {"a": "he said "no""}}</tool_call>',
        "<tool_call>{'name': 'add'}</tool_call>",
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>",
        "<tool_call><tool_call>",
    ),
    "llama3_json": (
        '<|python_tag|>{"name": "add", "parameters": {"a": NaN}}',
        '<|python_tag|>brave_search.call(query="x")',
        '<|python_tag|>{"name": "add", "parameters": "x"}',
    ),
    "mistral": (
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 01}}]',
        "[TOOL_CALLS][]",
        "[TOOL_CALLS]add[ARGS]1",
        "[TOOL_CALLS]{}",
        '[TOOL_CALLS]add[CALL_ID]x[ARGS]{"a": "\\x"}',
    ),
    "granite": (
        '<|tool_call|>{"arguments": {}}',
        "<tool_call>[]</tool_call>",
        '<|tool_call|>[{"name": "add", "arguments": 1}]',
    ),
    "phi4_mini_json": ("functools.lru_cache", "functools[1]", "functools"),
    "internlm": ("<|action_start|><|plugin|>{}<|action_end|>", "<|action_start|><|interpreter|>", "<|plugin|>"),
    "glm45": (
        "<tool_call>.",
        "<tool_call>",
        "<tool_call>add <b>",
        '<tool_call>{"name": "add", "arguments": {}}</tool_call>',
        "<tool_call>add\n<arg_key>a</arg_key>\n1\n</tool_call>",
        "<tool_call>add\n<arg_key>a</arg_key><arg_value>1</arg_value> 2</tool_call>",
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>add<｜tool▁sep｜>[]",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n[1]\n```<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜><｜tool▁sep｜>{}",
    ),
    "deepseek_v32": (
        "<｜DSML｜function_calls>",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="">\n</｜DSML｜invoke>',
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="add">\n.</｜DSML｜invoke>',
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="add">{"a": 1}.',
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="add"><｜DSML｜parameter name="a" string="no">',
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>1",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0 {}",
        "<|tool_call_begin|>functions.:0<|tool_call_argument_begin|>{}",
    ),
    "functiongemma": (
        "<start_function_call>",
        "<start_function_call>add{}",
        "<start_function_call>call:add{a}",
        "<start_function_call>call:add{a:}",
        "<start_function_call>call:{}",
        "<start_function_call>call:add{a:<b>}",
    ),
    "pythonic": (
        "<|python_start|>[add(1)]<|python_end|>",
        "<|python_start|>[add(a=1, a=2)]<|python_end|>",
        "<|python_start|>[add(a=b)]",
        "<|tool_call_start|>[add(a='\n')]<|tool_call_end|>",
        "<|tool_call_start|>[]",
    ),
}
BROKEN["deepseek_v31"] = BROKEN["deepseek_v3"]
BROKEN["gemma4"] = tuple(text.replace("<start_function_call>", "<|tool_call>") for text in BROKEN["functiongemma"])


class Parsed(NamedTuple):
    """What an answer says."""

    content: str
    calls: list[ToolCall]


class Made(NamedTuple):
    """An answer, the calls in it, and its content but for white space."""

    text: str
    calls: list[tuple[str, dict[str, Any]]]
    content: str


def value(random: random.Random, depth: int = 0) -> Any:
    kind = random.randrange(7 if depth < 3 else 5)
    match kind:
        case 0:
            return random.choice((True, False, None))
        case 1:
            return random.choice((0, -7, 10**20, 2.5, -1e-7))
        case 5:
            return [value(random, depth + 1) for _ in range(random.randrange(3))]
        case 6:
            return {random.choice(STRINGS): value(random, depth + 1) for _ in range(random.randrange(3))}
    return random.choice(STRINGS)


def call(random: random.Random) -> tuple[str, dict[str, Any]]:
    names = random.sample(("a", "city", "text_2"), random.randrange(4))
    return random.choice(list(OFFERED)), {name: value(random) for name in names}


def as_json(random: random.Random, name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    shown: dict[str, Any] = {"name": name, key: arguments, "id": "x"}
    return json.dumps(shown, ensure_ascii=random.random() < 0.5, indent=random.choice((None, 2)))


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


def written(random: random.Random, format: str, calls: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Calls after each other, as a model of that format says them anywhere in an answer."""
    space = random.choice(("", "\n", " \n"))
    if format == "hermes":
        return space.join(f"<tool_call>{space}{as_json(random, *one)}{space}</tool_call>" for one in calls)
    if format == "llama3_json":
        joined = f"{space};{space}".join(as_json(random, *one, "parameters") for one in calls)
        return f"<|python_tag|>{joined}"
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


def made(random: random.Random, format: str) -> Made:
    """A random answer: text, calls and what is almost a call, in any order."""
    text, content, calls = "", "", []
    for _ in range(random.randrange(1, 5)):
        kind = random.random()
        if kind < 0.5:
            some = [call(random) for _ in range(random.randrange(1, 4))]
            text, calls = text + written(random, format, some), calls + some
            text += random.choice(("", "\n"))
        else:
            part = random.choice(BROKEN[format] if kind < 0.7 else TEXTS)
            text, content = text + part + "\n", content + part
    return Made(text, calls, bare(content))


def bare(text: str) -> str:
    return "".join(text.split())


def ordered(format: str, texts: Sequence[str]) -> list[Piece]:
    """The content and the calls of an answer that comes in these texts. Content is one piece up to the next call."""
    parser: ToolParser = registered.load(registered.TOOLS, format)(OFFERED)
    found: list[Piece] = []
    for piece in [*(piece for text in texts for piece in parser.feed(text)), *parser.finish()]:
        if found and isinstance(piece, str) and isinstance(found[-1], str):
            found[-1] += piece
        else:
            found.append(piece)
    return found


def parsed(format: str, texts: Sequence[str]) -> Parsed:
    found = ordered(format, texts)
    content = "".join(one for one in found if isinstance(one, str))
    return Parsed(content, [one for one in found if isinstance(one, ToolCall)])


def cut(random: random.Random, text: str) -> list[str]:
    """The text in pieces: of one character, of tokens' length, or of many tokens."""
    longest = random.choice((1, 4, 12, 60))
    pieces = []
    while text:
        length = random.randrange(longest + 1)
        pieces, text = [*pieces, text[:length]], text[length:]
    return pieces


@pytest.mark.parametrize("format", FORMATS)
def test_no_cut_changes_an_answer_and_nothing_is_lost(format: str) -> None:
    chance = random.Random(format)
    for _ in range(CUTS // len(FORMATS) // 5):
        answer = made(chance, format)
        whole, pieces = parsed(format, [answer.text]), ordered(format, [answer.text])
        assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == answer.calls, answer.text
        assert bare(whole.content) == answer.content, answer.text
        for _ in range(5):
            assert ordered(format, cut(chance, answer.text)) == pieces, answer.text


@pytest.mark.parametrize("format", FORMATS)
def test_noise_is_content_to_the_letter(format: str) -> None:
    chance = random.Random(format)
    parts = [*BROKEN[format], *TEXTS, *"{}[]()<>\"'\\,:;=|", "add", '"name"', '{"name": "add", ', "add(a=", "\n"]
    for _ in range(1000):
        text = "".join(chance.choices(parts, k=chance.randrange(12)))
        whole = parsed(format, [text])
        assert parsed(format, cut(chance, text)) == whole
        if not whole.calls:
            assert whole.content == text


# -- what each format takes -----------------------------------------------------------------------------------------

ADD = [ToolCall("add", '{"a": 1}')]
LLAMA = '{"name": "add", "parameters": {"a": 1}}'
OTHER = LLAMA.replace("add", "other")


@pytest.mark.parametrize(
    ("format", "text", "expected"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}', Parsed("", ADD)),
        ("hermes", 'Yes.\n<tool_call>\n{"name":"add","arguments":{"a": 1}}\n</tool_call>\n', Parsed("Yes.", ADD)),
        ("hermes", '<tool_call>{"name": "f"}</tool_call> So', Parsed("So", [ToolCall("f", "{}")])),
        ("llama3_json", LLAMA, Parsed("", ADD)),
        ("llama3_json", f" {LLAMA}; {LLAMA}", Parsed("", ADD * 2)),
        ("llama3_json", f"{LLAMA}; {OTHER}", Parsed("; " + OTHER, ADD)),
        ("llama3_json", OTHER, Parsed(OTHER, [])),
        ("llama3_json", f"<|python_tag|>{OTHER}", Parsed("", [ToolCall("other", '{"a": 1}')])),
        ("llama3_json", f"See {LLAMA}", Parsed(f"See {LLAMA}", [])),
        ("llama3_json", '{"name": "add"}', Parsed('{"name": "add"}', [])),
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


def test_a_call_is_told_as_soon_as_it_is_complete_and_text_before_it_at_once() -> None:
    parser: ToolParser = registered.load(registered.TOOLS, "hermes")(OFFERED)
    assert parser.feed("Sure. <tool") == ["Sure."]
    assert parser.feed("box>") == [" <toolbox>"]
    assert parser.feed('<tool_call>{"name": "add", "arguments": {"a": 1}') == []
    assert parser.feed("}") == ADD


@pytest.mark.parametrize("deep", ["[", '{"a":'])
@pytest.mark.parametrize("format", FORMATS)
def test_depth_and_length_are_bounded(format: str, deep: str) -> None:
    """Neither brackets without end nor a long unfinished call cost more than their length."""
    start: Callable[[str], str] = {
        "hermes": '<tool_call>{{"name": "add", "arguments": {{"a": {}'.format,
        "llama3_json": '{{"name": "add", "parameters": {{"a": {}'.format,
        "mistral": '[TOOL_CALLS]add[ARGS]{{"a": {}'.format,
        "pythonic": "[add(a={}".format,
        "harmony": '<|channel|>commentary to=functions.add<|message|>{{"a": {}'.format,
        "qwen3_coder": "<tool_call><function=add><parameter=a>{}".format,
        "granite": '<|tool_call|>[{{"name": "add", "arguments": {{"a": {}'.format,
        "phi4_mini_json": 'functools[{{"name": "add", "arguments": {{"a": {}'.format,
        "internlm": '<|action_start|><|plugin|>{{"name": "add", "parameters": {{"a": {}'.format,
        "glm45": "<tool_call>add<arg_key>a</arg_key><arg_value>{}".format,
        "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{{{{{}".format,
        "deepseek_v31": '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{{"a": {}'.format,
        "deepseek_v32": '<｜DSML｜tool_calls><｜DSML｜invoke name="add">{{"a": {}'.format,
        "kimi_k2": '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{{"a": {}'.format,
        "functiongemma": "<start_function_call>call:add{{a: {}".format,
        "gemma4": "<|tool_call>call:add{{a: {}".format,
    }[format]
    text = start(deep * 100_000)
    assert parsed(format, [text[i : i + 50] for i in range(0, len(text), 50)]) == Parsed(text, [])
    text = start(deep * (MAX_DEPTH // 2) + '"' + "x" * 500_000)
    assert parsed(format, [text[i : i + 5] for i in range(0, len(text), 5)]) == Parsed(text, [])


def test_white_space_without_end_costs_no_more_than_its_length() -> None:
    """Joining it again with each piece would copy 400 GB."""
    pieces = ["\n   "] * 450_000
    assert parsed("hermes", ["x", *pieces, "y"]) == Parsed(f"x{''.join(pieces)}y", [])
    assert parsed("hermes", [*pieces, "y"]).content == "".join(pieces) + "y"


@pytest.mark.parametrize("format", ["gemma4", "hermes"])
def test_many_strings_are_not_read_again_for_each(format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(count: int) -> int:
        copies, span = 0, Source.span

        def counting(source: Source) -> str:
            nonlocal copies
            text = span(source)
            copies += len(text)
            return text

        strings = ", ".join(['"x"'] * count)
        text = {
            "gemma4": f"<|tool_call>call:add{{a: [{strings}]}}<tool_call|>",
            "hermes": "{" + '"id": "x", ' * count + '"name": "add", "arguments": {}}',
        }[format]
        with monkeypatch.context() as patch:
            patch.setattr(Source, "span", counting)
            assert len(parsed(format, [text]).calls) == (format == "gemma4")
        return copies

    assert copied(2000) <= 2 * copied(1000) + 100


def test_a_template_says_its_format() -> None:
    for template, format in (
        ('{{ "<tool_call>\\n" ~ tool_call.function | tojson ~ "</tool_call>" }}', "hermes"),
        ("<tool_call><function={{ name }}>", "qwen3_coder"),
        ("<|channel|>final<|message|>", "harmony"),
        ('Respond in the format {"name": function name, "parameters": dictionary of', "llama3_json"),
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
        ("{{ messages }}", ""),
    ):
        assert registered.fitting(registered.TOOLS, template) == format


def test_an_unknown_parser_is_refused_with_those_that_are_there() -> None:
    with pytest.raises(UsageError, match=r"--tool-call-parser 'qwen': there are auto, none, deepseek_v3"):
        registered.check(registered.TOOLS, "--tool-call-parser", "qwen")


PLUGIN = """
from ssd.frontend.parsers.source import Reading
from ssd.frontend.parsers.tools import ToolParser

class Shout(ToolParser):
    @classmethod
    def fits(cls, template: str) -> bool:
        return "SHOUT" in template

    def parse(self) -> Reading[None]:
        while (yield from self._content("CALL ")):
            yield from self._json_call()
"""
USES = """
from ssd.system import registered
name = registered.fitting(registered.TOOLS, "SHOUT")
parser = registered.load(registered.TOOLS, name)({"add": None})
print(name, parser.feed('So: CALL {"name": "add"} Done.'))
"""


def test_an_installed_package_adds_a_parser(tmp_path: Path) -> None:
    (tmp_path / "shouting.py").write_text(PLUGIN)
    about = tmp_path / "shouting-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: shouting\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[ssd.tool_parsers]\nshout = shouting:Shout\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", USES], env=environment, capture_output=True, text=True)
    assert done.stdout == "shout ['So:', ToolCall(name='add', arguments='{}'), ' Done.']\n", done.stderr
