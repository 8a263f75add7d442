"""Whole answers as models write them, format by format, cut at random: no call is lost, none leaks into content."""

from __future__ import annotations

import pytest

from ssd.frontend.parsers.answer import AnswerParser
from ssd.frontend.parsers.tools import Piece, ToolCall
from ssd.system import registered
from tests.frontend.parsers.goldens import (
    BARE,
    CERTAIN,
    CODE,
    NOW,
    ROME,
    TOKYO,
    WRITE,
    Golden,
    R,
    T,
    W,
    bare,
    check_certain,
    check_cuts,
    check_exact,
    check_golden,
    check_noise,
    check_strict,
    parser,
)

CUTS = 10_000  # of all goldens together
JSON_FORMATS = ("mistral", "granite", "phi4_mini_json", "internlm")


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
GOLDENS: dict[str, list[Golden]] = {
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
assert GOLDENS.keys() == set(registered.names(registered.TOOLS)) - {"hermes", "llama3_json"}
ALL = [(format, *golden) for format, goldens in GOLDENS.items() for golden in goldens]


def test_ten_thousand_cuts_lose_and_leak_nothing() -> None:
    check_cuts(GOLDENS, CUTS)


@pytest.mark.parametrize(("format", "text", "expected"), ALL, ids=lambda value: str(value)[:40])
def test_an_answer_without_calls_is_content_to_the_letter(format: str, text: str, expected: list[Piece]) -> None:
    check_golden(format, text, expected)


@pytest.mark.parametrize("format", JSON_FORMATS)
@pytest.mark.parametrize(("text", "after", "certain"), CERTAIN)
def test_text_that_cannot_become_a_call_is_told_at_once(format: str, text: str, after: str, certain: str) -> None:
    check_certain(format, text, after, certain)


@pytest.mark.parametrize("format", JSON_FORMATS)
def test_noise_around_bare_calls_is_the_same_however_it_is_cut(format: str) -> None:
    check_noise(format)


@pytest.mark.parametrize("format", JSON_FORMATS)
def test_an_enforced_answer_has_no_bare_calls(format: str) -> None:
    check_exact(format)


@pytest.mark.parametrize("format", JSON_FORMATS)
def test_bare_calls_of_strict_tools_are_those_that_obey(format: str) -> None:
    check_strict(format)


def test_calls_come_after_thoughts() -> None:
    reading = AnswerParser(registered.load(registered.REASONING, "gemma4")(False), parser("gemma4"))
    answer = reading.finish(f"<|channel>thought\nHm.\n<channel|>{GEMMA_ROME[0]}")
    assert (answer.reasoning, answer.calls, answer.content) == ("Hm.", [ROME], "")
