"""Whole answers as models write them, format by format, cut at random: the same calls and content, none lost or leaked.

The shapes are those of the models' chat templates and of answers that people have reported. Each golden is a text and
what is read of it, content and calls in their order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from ssd.frontend.parsers.answer import AnswerParser
from ssd.frontend.parsers.rules import Function, argument_check
from ssd.frontend.parsers.tools import Piece, ToolCall, ToolParser
from ssd.system import registered

CUTS = 10_000  # of all goldens together
TOOLS: dict[str, Any] = {
    "get_weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "write_file": {"properties": {"path": {"type": "string"}, "text": {"type": "string"}, "options": {}}},
    "now": None,
}
ROME = ToolCall("get_weather", '{"city": "Rome", "days": 2}')
TOKYO = ToolCall("get_weather", '{"city": "東京 🗼"}')
NOW = ToolCall("now", "{}")
CODE = r'{"path": "a b.py", "text": "print(\"{}]\")\n```json\n</tool_call>", "options": {"x": [1, {"ü": null}]}}'
WRITE = ToolCall("write_file", CODE)


def bare(call: ToolCall, key: str = "arguments") -> str:
    return f'{{"name": "{call.name}", "{key}": {call.arguments}}}'


def indented(call: ToolCall) -> str:
    return f'{{\n  "name": "{call.name}",\n  "arguments": {call.arguments}\n}}'


Golden = tuple[str, list[Piece]]
R, T, N, W = bare(ROME), bare(TOKYO), bare(NOW), bare(WRITE)
OTHER = '{"name": "other", "arguments": {"city": "Rome"}}'
DECLARED = '{"name": "get_weather", "description": "The weather", "parameters": {"type": "object"}}'
BARE: list[Golden] = [
    # calls
    (R, [ROME]),
    (f"\n\n{R}\n", [ROME]),
    (bare(ROME, "parameters"), [ROME]),
    (indented(WRITE), [WRITE]),
    (W, [WRITE]),
    (f"{R}\n{T}\n{N}", [ROME, TOKYO, NOW]),
    (f"{R}; {T}", [ROME, TOKYO]),
    (f"{R}, {T}", [ROME, TOKYO]),
    (f"{R}{T}", [ROME, TOKYO]),
    (f"[{R}, {T}]", [ROME, TOKYO]),
    (f"[\n  {indented(ROME)},\n  {W}\n]\n", [ROME, WRITE]),
    (f"```json\n{R}\n```", [ROME]),
    (f"```\n{R}\n```", [ROME]),
    (f"```tool_call\n{R}\n{T}\n```\n", [ROME, TOKYO]),
    (f"```json\n[{R}, {T}]\n```", [ROME, TOKYO]),
    (f"```json\n{R}\n```\n```json\n{T}\n```", [ROME, TOKYO]),
    (f"````json\n{R}\n````", [ROME]),
    (f"```json\n{R}", [ROME]),
    (f"<tools>\n{R}\n</tools>", [ROME]),
    (f"<tools>\n{R}\n{T}\n</tools>", [ROME, TOKYO]),
    (f"<function_call>{R}</function_call>", [ROME]),
    (f"<tool_call>\n{R}\n</tool_call>\n<tool_call>\n{T}\n</tool_call>", [ROME, TOKYO]),
    (f"```xml\n<tools>\n{R}\n</tools>\n```", [ROME]),
    (f"{R}\n</tool_call>", [ROME]),
    (f"<tools>{R}</tools><tools>{T}</tools> ```json\n{N}\n```", [ROME, TOKYO, NOW]),
    (f"<tools>{R}", [ROME]),
    ('{"function": "now", "arguments": {}}', [NOW]),
    (f'{{"id": "c1", "type": "function", "function": {R}}}', [ROME]),
    (f'[{{"function": {R}}}, {{"type": "function", "function": {W}}}]', [ROME, WRITE]),
    (f"```JSON\n{R}\n```", [ROME]),
    (f"```Json\r\n{R}\r\n```\r\n", [ROME]),
    (f"<tools>\n```json\n{R}\n{T}\n```\n</tools>", [ROME, TOKYO]),
    (f"<tools>```{R}```</tools> {T}", [ROME, TOKYO]),
    ('{"arguments": {"city": "Rome", "days": 2}, "name": "get_weather"}', [ROME]),
    ('{"type": "function", "id": "c1", "name": "now", "parameters": {}}', [NOW]),
    (r'{"name": "get_weather", "arguments": "{\"city\": \"Rome\", \"days\": 2}"}', [ROME]),
    # prose around them
    (f"Let me look.\n\n{R}", ["Let me look.", ROME]),
    (f"To do so I call:\n```json\n{R}\n```\nThen I answer.", ["To do so I call:", ROME, "Then I answer."]),
    (f"Two:\n<tools>\n{R}\n{T}\n</tools>\nDone.", ["Two:", ROME, TOKYO, "Done."]),
    (f"{R}\nThat calls it.\n{T}", [ROME, "That calls it.", TOKYO]),
    (f"```json\n{R}\n// that is it\n```\n{T}", [ROME, "// that is it\n```", TOKYO]),
    (f"```python\nx = 1\n```\n{R}", ["```python\nx = 1\n```", ROME]),
    (f'```json\n{{"a": 1}}\n```\n```json\n{R}\n```', ['```json\n{"a": 1}\n```', ROME]),
    (f"```python\r\nx = 1\r\n```\r\n{R}", ["```python\r\nx = 1\r\n```", ROME]),
    (f'```json\n{{"a": 1}}```\nNow:\n```json\n{R}\n```', ['```json\n{"a": 1}```\nNow:', ROME]),
    (f"````md\nx```\n{T}\ny`````  \n{R}", [f"````md\nx```\n{T}\ny`````", ROME]),
    (f"{{\n{R}", ["{", ROME]),
    (f"{R}; {OTHER}", [ROME, f"; {OTHER}"]),
    (f"```json\n{R}\n{OTHER}\n```\n{T}", [ROME, f"{OTHER}\n```", TOKYO]),
    (f"[{R}, {OTHER}]", [ROME, f", {OTHER}]"]),
    # no calls
    *(
        (text, [text])
        for text in (
            f"Call {R}",
            f"- {R}",
            f"  x\n  {R}",
            OTHER,
            DECLARED,
            f"<tools>\n{DECLARED}\n</tools>",
            f"```json\n{OTHER}\n```",
            f"```json\n{DECLARED}\n```",
            f"```python\n{R}\n```",
            f"```markdown\nSo:\n{R}\n```",
            f"```markdown\n```json\n{R}\n```",
            f"````markdown\n```\n{R}\n````",
            f"```python\nx = '```'\n{R}\n```",
            f"<tools>\n```python\n{R}\n```\n</tools>",
            f"`{R}`",
            f"<b>{R}",
            '{"name": "now"}',
            '{"name": "now", "arguments": []}',
            '{"name": "now", "arguments": "no"}',
            '{"name": "now", "arguments": "[1]"}',
            '{"name": "now", "name": "now", "arguments": {}}',
            '{"name": "now", "arguments": {}, "why": "?"}',
            '{"id": "a", "id": "b", "name": "now", "arguments": {}}',
            '{"type": "function", "type": "function", "name": "now", "arguments": {}}',
            '{"type": "function", "function": {"name": "now", "parameters": {}}}',
            '{"type": "function", "function": {"name": "now"}, "arguments": {}}',
            '{"name": "now", "function": {"name": "now", "arguments": {}}}',
            '{"function": {"function": {"name": "now", "arguments": {}}}}',
            '{"name": "now", "arguments": {"a": 01}}',
            "{'name': 'now', 'arguments': {}}",
            "[1, 2]\n{}\n```\n```\n<tools></tools>",
            "a\n```js\nb",
            "# Title\n\n- a\n- b\n\n| c |\n<details>",
        )
    ),
    *((R[:end], [R[:end]]) for end in (1, 8, 14, 30, len(R) - 1)),
    *((f"```json\n{R}"[:end], [f"```json\n{R}"[:end]]) for end in (2, 3, 6, 8, 9, 40)),
    *((text, [text.rstrip()]) for text in (f"So:\n<tools>\n{R[:-2]}", f"So:\n[{R[:-9]}")),
]


def glm(call: str, *arguments: tuple[str, str], space: str = "\n") -> str:
    given = "".join(f"<arg_key>{k}</arg_key>{space}<arg_value>{v}</arg_value>{space}" for k, v in arguments)
    return f"<tool_call>{call}{space}{given}</tool_call>"


GLM_ROME = glm("get_weather", ("city", "Rome"), ("days", "2"))
GLM_CODE = glm(
    "write_file",
    ("path", "a b.py"),
    ("text", 'print("{}]")\n```json\n</tool_call>'),
    ("options", '{"x": [1, {"ü": null}]}'),
)
FREE_CODE = ToolCall(
    "write_file",
    r'{"path": "a b.py", "text": "print(\"{}]\")\n```json\n</tool_call>", "options": "{\"x\": [1, {\"ü\": null}]}"}',
)
V3_BEGIN, V3_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def v3(call: ToolCall) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n{call.arguments}\n```<｜tool▁call▁end｜>"


def v31(call: ToolCall) -> str:
    return f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{call.arguments}<｜tool▁call▁end｜>"


def dsml(name: str, *arguments: tuple[str, str, str]) -> str:
    given = "".join(
        f'<｜DSML｜parameter name="{key}" string="{kind}">{value}</｜DSML｜parameter>\n'
        for key, kind, value in arguments
    )
    return f'<｜DSML｜invoke name="{name}">\n{given}</｜DSML｜invoke>\n'


def block(*calls: str, name: str = "function_calls") -> str:
    return f"<｜DSML｜{name}>\n{''.join(calls)}</｜DSML｜{name}>"


DSML_ROME = dsml("get_weather", ("city", "true", "Rome"), ("days", "false", "2"))
DSML_CODE = dsml(
    "write_file",
    ("path", "true", "a b.py"),
    ("text", "true", 'print("{}]")\n```json\n</tool_call>'),
    ("options", "false", '{"x": [1, {"ü": null}]}'),
)
KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def kimi(call: ToolCall, index: int) -> str:
    return (
        f"<|tool_call_begin|>functions.{call.name}:{index}<|tool_call_argument_begin|>{call.arguments}<|tool_call_end|>"
    )


def gemma(text: str) -> tuple[str, str]:
    """A call of Gemma 4, and of FunctionGemma, of a text with `«` and `»` as quotes."""
    four = text.replace("«", '<|"|>').replace("»", '<|"|>')
    return f"<|tool_call>{four}<tool_call|>", (
        f"<start_function_call>{text.replace('«', '<escape>').replace('»', '<escape>')}<end_function_call>"
    )


GEMMA_ROME = gemma("call:get_weather{city:«Rome»,days:2}")
GEMMA_TOKYO = gemma("call:get_weather{city:«東京 🗼»}")
GEMMA_CODE = gemma('call:write_file{path:«a b.py»,text:«print("{}]")\n```json\n</tool_call>»,options:{x:[1,{ü:null}]}}')
GEMMA_NOW = gemma("call:now{}")


def of_gemma(index: int) -> list[Golden]:
    rome, tokyo, code, now = (each[index] for each in (GEMMA_ROME, GEMMA_TOKYO, GEMMA_CODE, GEMMA_NOW))
    open_day = rome.replace("days:2", "days:«two»".replace("«", "").replace("»", ""))
    return [
        (rome, [ROME]),
        (f"Let me see.\n{tokyo}", ["Let me see.", TOKYO]),
        (rome + tokyo + now, [ROME, TOKYO, NOW]),
        (code, [WRITE]),
        (f"{now}\nDone {{a:1}}.", [NOW, "Done {a:1}."]),
        (open_day, [ToolCall("get_weather", '{"city": "Rome", "days": "two"}')]),
        (rome.replace("2}", "2,}"), [ROME]),
        *((rome[:end], [rome[:end]]) for end in (5, 18, 30, 45, rome.rindex("}"))),
        ("<tool> call:now{}", ["<tool> call:now{}"]),
    ]


def xml(name: str, **arguments: str) -> str:
    given = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{given}</function>\n</tool_call>"


def harmony(call: ToolCall) -> str:
    to = f"commentary to=functions.{call.name} <|constrain|>json"
    return f"<|channel|>{to}<|message|>{call.arguments}<|call|>"


XML_ROME = xml("get_weather", city="Rome", days="2")
XML_FILE = ToolCall(
    "write_file", r'{"path": "a b.py", "text": "print(\"{}]\")\n```json\n</tool_call>", "options": "{\"x\": 1}"}'
)
CUT_HERMES = f"<tool_call>\n{R[:-5]}"
GOLDENS: dict[str, list[Golden]] = {
    "hermes": [
        *BARE,
        (
            f"Let me look.\n<tool_call>\n{R}\n</tool_call>\n<tool_call>\n{W}\n</tool_call>",
            ["Let me look.", ROME, WRITE],
        ),
        (f"<tool_call>{R}\n{T}</tool_call>", [ROME, TOKYO]),
        (f"<tool_call>\n[{R}, {T}]\n</tool_call>", [ROME, TOKYO]),
        (f"So <tool_call>{OTHER}</tool_call>", ["So", ToolCall("other", '{"city": "Rome"}')]),
        ('<tool_call>{"name": "now"}</tool_call>', [NOW]),
        (CUT_HERMES, [CUT_HERMES]),
        (f"<tool_call>\n```json\n{R}\n```\n</tool_call>\n{T}", [ROME, TOKYO]),
        # a mark is one in a fence too
        (f"```python\nx\n<tool_call>{R}</tool_call>\n```\n{T}", ["```python\nx", ROME, "\n```", TOKYO]),
    ],
    "llama3_json": [
        *BARE,
        (f"<|python_tag|>{bare(ROME, 'parameters')}; {bare(WRITE, 'parameters')}", [ROME, WRITE]),
        (f"<|python_tag|>{OTHER}", [ToolCall("other", '{"city": "Rome"}')]),
    ],
    "mistral": [
        *BARE,
        (f"[TOOL_CALLS][{R}, {W}]", [ROME, WRITE]),
        (f"[TOOL_CALLS] [{R}]\n\nDone.", [ROME, "Done."]),
        (f"Yes.[TOOL_CALLS]now[ARGS]{{}}[TOOL_CALLS]write_file[ARGS]{CODE}", ["Yes.", NOW, WRITE]),
        (f"[TOOL_CALLS]{R}", [ROME]),
        ("[TOOL_CALLS]now[ARGS]{", ["[TOOL_CALLS]now[ARGS]{"]),
    ],
    "granite": [
        *BARE,
        (f"<|tool_call|>[{R}, {T}]", [ROME, TOKYO]),
        (f"<|tool_call|> [{W}]<|/tool_call|>", [WRITE]),
        (f"I look.\n<tool_call>[{R}]", ["I look.", ROME]),
        (f"<|tool_call|>[{R[:-1]}", [f"<|tool_call|>[{R[:-1]}"]),
    ],
    "phi4_mini_json": [
        *BARE,
        (f"functools[{R}, {W}]", [ROME, WRITE]),
        (f"I look.\nfunctools[{R}]\nDone.", ["I look.", ROME, "Done."]),
        ('functools[{"name": "now"}]', [NOW]),
        *(
            (text, [text])
            for text in (
                "Use functools.cache.",
                'import functools\n{"name": "Bob"}',
                'functools {"name": "Bob"}',
                'functools[{"name": "Bob", "arguments": {}}]',
                f"Write functools[{R}]",
            )
        ),
    ],
    "internlm": [
        *BARE,
        (f"I look.<|action_start|><|plugin|>\n{bare(ROME, 'parameters')}<|action_end|>\n", ["I look.", ROME]),
        (f"<|action_start|> <|plugin|>{W}<|action_end|>", [WRITE]),
    ],
    "glm45": [
        (GLM_ROME, [ROME]),
        (f"I look.\n{GLM_ROME}\n{glm('get_weather', ('city', '東京 🗼'))}", ["I look.", ROME, TOKYO]),
        (glm("get_weather", ("city", "Rome"), ("days", "2"), space=""), [ROME]),
        (GLM_CODE, [FREE_CODE]),
        (f"{glm('now')} Done.", [NOW, "Done."]),
        (
            glm("get_weather", ("city", " 7 "), ("days", "two")),
            [ToolCall("get_weather", '{"city": " 7 ", "days": "two"}')],
        ),
        (glm("get_weather", ("city", "")), [ToolCall("get_weather", '{"city": ""}')]),
        *((GLM_ROME[:end], [GLM_ROME[:end]]) for end in (5, 14, 30, 50, 70, len(GLM_ROME) - 1)),
        (f"<tool_call>\n{R}\n</tool_call>", [f"<tool_call>\n{R}\n</tool_call>"]),
    ],
    "deepseek_v3": [
        (V3_BEGIN + v3(ROME) + V3_END, [ROME]),
        (f"I look.{V3_BEGIN}{v3(ROME)}\n{v3(TOKYO)}{V3_END}", ["I look.", ROME, TOKYO]),
        (V3_BEGIN + v3(WRITE) + V3_END, [WRITE]),
        (v3(NOW), [NOW]),
        (V3_BEGIN + v3(ROME) + v31(NOW) + V3_END, [ROME, NOW]),
        (f"{V3_BEGIN}{v3(ROME)}{V3_END}\nDone.", [ROME, "Done."]),
        (V3_BEGIN + v3(ROME)[:-24], [V3_BEGIN + v3(ROME)[:-24]]),
        (V3_BEGIN + v3(ROME) + v3(TOKYO)[:-25], [ROME, v3(TOKYO)[:-25]]),
        ("<｜tool▁calls", ["<｜tool▁calls"]),
    ],
    "deepseek_v31": [
        (V3_BEGIN + v31(ROME) + v31(TOKYO) + V3_END, [ROME, TOKYO]),
        (f"I look.\n\n{V3_BEGIN}{v31(WRITE)}{V3_END}", ["I look.", WRITE]),
        (f"{V3_BEGIN}{v31(NOW)}", [NOW]),
        (v3(NOW), [NOW]),
        (v31(ROME).replace("{", "```json\n{").replace("}", "}\n```"), [ROME]),
        (v3(NOW).replace("now", ""), [v3(NOW).replace("now", "")]),
        (V3_BEGIN + v31(ROME)[:-19], [V3_BEGIN + v31(ROME)[:-19]]),
    ],
    "deepseek_v32": [
        (block(DSML_ROME), [ROME]),
        (f"I look.\n\n{block(DSML_ROME, dsml('now'), name='tool_calls')}", ["I look.", ROME, NOW]),
        (block(DSML_CODE), [WRITE]),
        (block(dsml("get_weather", ("city", "true", "7"))), [ToolCall("get_weather", '{"city": "7"}')]),
        (block(DSML_ROME.replace(' string="true"', "").replace(' string="false"', "")), [ROME]),
        (block(f'<｜DSML｜invoke name="get_weather">{TOKYO.arguments}</｜DSML｜invoke>'), [TOKYO]),
        (f"{block(dsml('now'))}\nDone <b>.", [NOW, "Done <b>."]),
        *((block(DSML_ROME)[:end], [block(DSML_ROME)[:end]]) for end in (9, 40, 80, 120, 200)),
    ],
    "kimi_k2": [
        (f"{KIMI_BEGIN}{kimi(ROME, 0)}{kimi(TOKYO, 1)}{KIMI_END}", [ROME, TOKYO]),
        (f"I look.{KIMI_BEGIN}{kimi(WRITE, 7)}{KIMI_END}", ["I look.", WRITE]),
        (f"{KIMI_BEGIN}\n{kimi(NOW, 0)}\n{KIMI_END}\nDone.", [NOW, "Done."]),
        (kimi(NOW, 0).replace("functions.", "").replace(":0", ":0 "), [NOW]),
        (KIMI_BEGIN + kimi(ROME, 0)[:-18], [KIMI_BEGIN + kimi(ROME, 0)[:-18]]),
        (KIMI_BEGIN + kimi(ROME, 0) + kimi(NOW, 1)[:30], [ROME, kimi(NOW, 1)[:30]]),
    ],
    "qwen3_coder": [
        (XML_ROME, [ROME]),
        (f"I look.\n\n{XML_ROME}\n{xml('get_weather', city='東京 🗼')}", ["I look.", ROME, TOKYO]),
        (xml("write_file", path="a b.py", text='print("{}]")\n```json\n</tool_call>', options='{"x": 1}'), [XML_FILE]),
        (f"{xml('now')}\nDone <b>.", [NOW, "Done <b>."]),
        (XML_ROME.removeprefix("<tool_call>\n"), [ROME]),
        *((XML_ROME[:end], [XML_ROME[:end]]) for end in (5, 30, 60, 90)),
    ],
    "pythonic": [
        ('[get_weather(city="Rome", days=2)]', [ROME]),
        ("[get_weather(city='東京 🗼'), now()]\nDone.", [TOKYO, NOW, "Done."]),
        ('I look.<|tool_call_start|>[get_weather(city="Rome", days=2)]<|tool_call_end|>', ["I look.", ROME]),
        ("[get_weather(city='Ro", ["[get_weather(city='Ro"]),
        ("[other(a=1)]", ["[other(a=1)]"]),
    ],
    "harmony": [
        (harmony(ROME), [ROME]),
        (f"I look.{harmony(WRITE)}", ["I look.", WRITE]),
        (harmony(NOW).replace(" <|constrain|>", " "), [NOW]),
        (harmony(ROME)[:-20], [harmony(ROME)[:-20]]),
    ],
    "gemma4": of_gemma(0),
    "functiongemma": of_gemma(1),
}
assert GOLDENS.keys() == set(registered.names(registered.TOOLS))
ALL = [(format, *golden) for format, goldens in GOLDENS.items() for golden in goldens]


def pieces(chance: random.Random, text: str) -> Iterator[str]:
    longest = chance.choice((1, 3, 9, 40))
    while text:
        length = chance.randrange(longest + 1)
        yield text[:length]
        text = text[length:]


def joined(parts: list[Piece]) -> list[Piece]:
    """Content and calls, with neighbouring contents as one, without the white space around calls."""
    found: list[Piece] = []
    for part in parts:
        if found and isinstance(part, str) and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return [part.strip() if isinstance(part, str) else part for part in found]


def parser(format: str) -> ToolParser:
    made: ToolParser = registered.load(registered.TOOLS, format)(TOOLS)
    return made


def test_ten_thousand_cuts_lose_and_leak_nothing() -> None:
    """What was told is at every moment the beginning of what the whole answer says: no text of a call is in it."""
    chance, done = random.Random(0), 0
    lost, leaked = [], []
    while done < CUTS:
        for format, text, expected in ALL:
            reading, told = parser(format), []
            whole = "".join(part for part in expected if isinstance(part, str))
            for piece in pieces(chance, text):
                told += reading.feed(piece)
                content = "".join(part for part in told if isinstance(part, str))
                if not "".join(whole.split()).startswith("".join(content.split())):
                    leaked.append((format, text, content))
            told += reading.finish()
            if joined(told) != [part.strip() if isinstance(part, str) else part for part in expected]:
                lost.append((format, text, told))
            done += 1
    assert (len(lost), len(leaked)) == (0, 0), (lost + leaked)[0]


@pytest.mark.parametrize(("format", "text", "expected"), ALL, ids=lambda value: str(value)[:40])
def test_an_answer_without_calls_is_content_to_the_letter(format: str, text: str, expected: list[Piece]) -> None:
    reading = parser(format)
    told = [*reading.feed(text), *reading.finish()]
    assert joined(told) == [part.strip() if isinstance(part, str) else part for part in expected]
    if not any(isinstance(part, ToolCall) for part in expected):
        assert "".join(map(str, told)) == text


def test_only_the_white_space_around_calls_is_left_out() -> None:
    for text, content in (
        (f"Two:\n\n```json\n{R}\n\n{T}\n```\n\nDone.", "Two:\n\nDone."),
        (f"{R}\n\nDone.\n", "Done."),
        (f"A\n<tools>\n{R}\n</tools>\nB\n\n{T} C", "A\nB C"),
        (f"A\n<tool_call>\n{R}\n</tool_call>\nB", "A\nB"),
    ):
        reading = parser("hermes")
        told = [*reading.feed(text), *reading.finish()]
        assert "".join(part for part in told if isinstance(part, str)) == content


JSON_FORMATS = ("hermes", "llama3_json", "mistral", "granite", "phi4_mini_json", "internlm")


@pytest.mark.parametrize("format", JSON_FORMATS)
@pytest.mark.parametrize(
    ("text", "after", "certain"),
    [
        ('{"name": "no', "w", ""),
        ('{"name": "', "x", '{"name": "x'),
        ("{", "1", "{1"),
        ('{"name": "now", "arguments": ', "1", '{"name": "now", "arguments": 1'),
        ("```", "j", ""),
        ("```j", "s", ""),
        ("```j", "a", "```ja"),
        ("```", "p", "```p"),
        ("`", "a", "`a"),
        ("<tool", "s", ""),
        ("<tool", "box", "<toolbox"),
        ("[", "x", "[x"),
        ("One line.\n", "{", "One line."),
        ("One line.\n{", "x", "One line.\n{x"),
        ("One line", ".", "One line."),
        ("One {", "", "One {"),
    ],
)
def test_text_that_cannot_become_a_call_is_told_at_once(format: str, text: str, after: str, certain: str) -> None:
    reading = parser(format)
    assert "".join(map(str, [*reading.feed(text), *reading.feed(after)])) == certain


@pytest.mark.parametrize("format", JSON_FORMATS)
def test_noise_around_bare_calls_is_the_same_however_it_is_cut(format: str) -> None:
    chance, parts = (
        random.Random(format),
        [R, OTHER, *"\n\n\n{[;,", "```", "```json\n", "<tools>", "</tools>", "So", "\n```"],
    )
    for _ in range(1000):
        text = "".join(chance.choices(parts, k=chance.randrange(12)))
        whole, cut = parser(format), parser(format)
        told = [*whole.feed(text), *whole.finish()]
        assert joined([*(one for piece in pieces(chance, text) for one in cut.feed(piece)), *cut.finish()]) == joined(
            told
        )
        if not any(isinstance(part, ToolCall) for part in told):
            assert "".join(map(str, told)) == text


@pytest.mark.parametrize("format", JSON_FORMATS)
def test_an_enforced_answer_has_no_bare_calls(format: str) -> None:
    """Only the format's own calls obey the grammar; a bare one in its free text is not checked by anything."""
    exact: ToolParser = registered.load(registered.TOOLS, format)(TOOLS, exact=True)
    text = f"So:\n{R}\n```json\n{R}\n```"
    assert "".join(map(str, [*exact.feed(text), *exact.finish()])) == text


DAYS = {"type": "integer", "minimum": 1, "maximum": 14}
STRICT = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "東京 🗼"]}, "days": DAYS},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("format", JSON_FORMATS)
def test_bare_calls_of_strict_tools_are_those_that_obey(format: str) -> None:
    long = {"properties": {f"n{number}": {"type": "string", "pattern": "^[a-z]+$"} for number in range(200)}}
    many = {"properties": {"a": {"type": "array", "items": {"anyOf": [{"type": "array", "items": {}}] * 150}}}}
    functions = [Function("get_weather", STRICT, True), Function("now", None, True), Function("write_file", long, True)]
    functions.append(Function("count", many, True))
    for name, arguments, right in (
        ("get_weather", '{"city": "Rome"}', True),
        ("get_weather", '{\n  "days": 3 ,\n  "city" : "\\u6771\\u4eac 🗼"\n}', True),
        ("get_weather", '"{\\"city\\": \\"Rome\\"}"', True),
        ("get_weather", '{"city": "Rome", "days": 15}', False),
        ("get_weather", '{"city": "Rome", "days": "3"}', False),
        ("get_weather", '{"city": "Rome", "unit": "C"}', False),
        ("get_weather", '{"city": "\\ud83d"}', False),
        ("get_weather", '{"days": 3}', False),
        ("now", "{}", True),
        ("now", '{"zone": "CET"}', False),
        ("write_file", '{"n1": "a"}', False),  # it would take a server too long to compile
        ("count", '{"a": [[1]]}', False),  # too long to read
        ("get_weather", '{"city": "Rome"' + " " * 4096 + "}", False),
    ):
        call = f'{{"name": "{name}", "arguments": {arguments}}}'
        for text in (call, f"```json\n{call}\n```", f"So:\n{call}"):
            loaded = registered.load(registered.TOOLS, format)
            made: ToolParser = loaded(TOOLS, obey=argument_check(functions))
            found = [*made.feed(text), *made.finish()]
            assert any(isinstance(piece, ToolCall) for piece in found) is right, text
            assert right or "".join(map(str, found)) == text


def test_bare_calls_come_after_thoughts_and_no_more_than_asked() -> None:
    thoughts = registered.load(registered.REASONING, "think")
    for most, calls in ((None, [ROME, TOKYO]), (1, [ROME])):
        reading = AnswerParser(thoughts(True), parser("hermes"), most)
        answer = reading.finish(f"I call:\n{R}\n</think>\n\n```json\n{R}\n```\nand\n{T}\nDone.")
        assert (answer.reasoning, answer.calls) == (f"I call:\n{R}", calls)
        assert answer.content.split() == ["and", "Done."]
    reading = AnswerParser(registered.load(registered.REASONING, "gemma4")(False), parser("gemma4"))
    answer = reading.finish(f"<|channel>thought\nHm.\n<channel|>{GEMMA_ROME[0]}")
    assert (answer.reasoning, answer.calls, answer.content) == ("Hm.", [ROME], "")
