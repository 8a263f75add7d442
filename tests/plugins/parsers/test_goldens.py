"""Whole answers of gpt-oss and of Qwen 3.5, cut anywhere: the same thoughts, content and calls in the same order."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from ssd.frontend.parsers.answer import Answer, AnswerParser, joined
from ssd.frontend.parsers.reasoning import Thought
from ssd.frontend.parsers.tools import ToolCall
from ssd.system import registered

CUTS = 60
TOOLS: dict[str, Any] = {
    "get_weather": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "limit": {"type": "number"},
            "near": {"type": "array", "items": {}},
            "more": {"$ref": "#/$defs/more"},
            "unit": {"enum": ["C", "F", 7]},
            "zone": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "loop": {"$ref": "#/$defs/loop"},
            "odd": {"type": {"no": "schema"}},
        },
        "$defs": {"more": {"type": "object"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}] * 9}},
    },
    "now": None,
}
Said = list[Thought | ToolCall | str]


def cut(text: str, seed: int) -> list[str]:
    """The text in pieces of random lengths, some empty; whole for seed 0, and by single characters for seed 1."""
    chance, longest, pieces = random.Random(seed), (1, 3, 9, 40)[seed % 4], []
    while text:
        length = len(text) if seed == 0 else 1 if seed == 1 else chance.randrange(longest + 1)
        pieces, text = [*pieces, text[:length]], text[length:]
    return pieces


def said(name: str, tools: str | None, opened: bool, texts: Sequence[str]) -> Said:
    """The parts of an answer; neighbours of a kind are one, but for calls."""
    calls = registered.load(registered.TOOLS, tools)(TOOLS) if tools else None
    parser = AnswerParser(registered.load(registered.REASONING, name)(opened), calls)
    answer: Answer = joined([*(parser.feed(text) for text in texts), parser.finish("")])
    found: Said = []
    for piece in answer.pieces:
        last = found[-1] if found else None
        if isinstance(piece, Thought) and isinstance(last, Thought):
            found[-1] = Thought(last.text + piece.text)
        elif isinstance(piece, str) and isinstance(last, str):
            found[-1] = last + piece
        else:
            found.append(piece)
    return found


# -- gpt-oss --------------------------------------------------------------------------------------------------------

ASKS = "<|channel|>analysis<|message|>The user asks for Rome.\n\nI call.<|end|>"
CALLS = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rōma"}<|call|>'
CALL = ToolCall("get_weather", '{"city": "Rōma"}')
NEXT = "<|start|>assistant"
ANSWERS = "<|channel|>final<|message|>Sunny, 20°.\n\n- dry<|return|>"
ASKED, ANSWER = Thought("The user asks for Rome.\n\nI call."), "Sunny, 20°.\n\n- dry"

HARMONY: list[tuple[str, Said]] = [
    (ANSWERS, [ANSWER]),
    (ASKS + NEXT + ANSWERS, [ASKED, ANSWER]),
    (ASKS + NEXT + CALLS, [ASKED, CALL]),
    (ASKS + NEXT + CALLS.removesuffix("<|call|>"), [ASKED, CALL]),
    (CALLS.replace(" <|constrain|>", " "), [CALL]),
    (CALLS.replace(" <|constrain|>json", ""), [CALL]),
    (CALLS.replace("commentary", "analysis"), [CALL]),
    (
        f"{ASKS}{NEXT} to=functions.get_weather<|channel|>commentary json{CALLS[CALLS.index('<|message|>') :]}",
        [ASKED, CALL],
    ),
    (CALLS.replace("get_weather", "unknown"), [ToolCall("unknown", CALL.arguments)]),
    (
        f"{ASKS}{NEXT}<|channel|>commentary<|message|>Let me look.<|end|>{NEXT}{CALLS}{NEXT}{CALLS}",
        [ASKED, "Let me look.", CALL, CALL],
    ),
    (
        f"{ASKS}{NEXT}<|channel|>commentary<|message|>First.<|end|>{NEXT}{ASKS}{NEXT}{ANSWERS}",
        [ASKED, "First.", Thought("\n" + ASKED.text), "\n" + ANSWER],
    ),
    ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", [Thought("1 + 1")]),
    ("<|channel|>commentary to=browser.search json<|message|>{}<|call|>", [Thought("{}")]),
    (f"{ASKS.removesuffix('<|end|>')}{ANSWERS}", [ASKED, ANSWER]),
    ("<|message|>Sunny.<|end|>", ["Sunny."]),
    ("Sunny <b>.", ["Sunny <b>."]),
    ("to be", ["to be"]),
    # cut by max_tokens
    (ASKS[:-20], [Thought(ASKED.text[:-13])]),
    (ASKS + NEXT, [ASKED]),
    (ASKS + NEXT + "<|channel|>fin", [ASKED]),
    (ASKS + NEXT + "<|channel|>commentary to=functions.get_wea", [ASKED]),
    ("<|channel|>final<|message|>a <|", ["a <|"]),
    (
        CALLS[: CALLS.index("ma")],
        ['<|channel|>commentary to=functions.get_weather<|message|>{"city": "Rō'],
    ),
    (
        f"{CALLS.replace('}', ']')}{NEXT}{CALLS}",
        ['<|channel|>commentary to=functions.get_weather<|message|>{"city": "Rōma"]', CALL],
    ),
]


@pytest.mark.parametrize(("text", "expected"), HARMONY, ids=lambda value: str(value)[-30:])
def test_what_gpt_oss_says(text: str, expected: Said) -> None:
    for seed in range(CUTS):
        assert said("harmony", "harmony", True, cut(text, seed)) == expected, seed


def test_an_answer_of_gpt_oss_may_begin_inside_of_a_message() -> None:
    for seed in range(CUTS):
        assert said("harmony", "harmony", False, cut(f"and dry.<|end|>{NEXT}{CALLS}", seed)) == ["and dry.", CALL]


def test_noise_of_gpt_oss_is_the_same_however_it_is_cut() -> None:
    chance = random.Random(0)
    parts = [
        ASKS,
        CALLS,
        ANSWERS,
        NEXT,
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        " ",
        "to=",
        "x<|",
        "json",
    ]
    for seed in range(500):
        text = "".join(chance.choices(parts, k=chance.randrange(9)))
        whole = said("harmony", "harmony", True, [text])
        assert said("harmony", "harmony", True, cut(text, seed + 1)) == whole, text


# -- Qwen 3.5 -------------------------------------------------------------------------------------------------------


def xml(*parameters: tuple[str, str], name: str = "get_weather") -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


NESTED = '{"a": [1, {"ü": null}],\n "b": "</x>"}'
VALUES: list[tuple[str, str, Any]] = [
    ("city", "São Paulo", "São Paulo"),
    ("city", "7", "7"),
    ("city", "null", "null"),
    ("city", '"Rome"', '"Rome"'),
    ("city", "\n two\nlines \n", "\n two\nlines \n"),
    ("city", "</tool_call><tool_call> a < b </param", "</tool_call><tool_call> a < b </param"),
    ("days", "7", 7),
    ("days", "100000000000000000000", 10**20),
    ("days", " -3 ", -3),
    ("days", "soon", "soon"),
    ("days", "null", None),
    ("exact", "true", True),
    ("exact", "False", False),
    ("limit", "2.5e3", 2500.0),
    ("limit", "NaN", "NaN"),
    ("near", '["a", ["日本"], 1]', ["a", ["日本"], 1]),
    ("near", "[1,", "[1,"),
    ("more", NESTED, json.loads(NESTED)),
    ("unit", "F", "F"),
    ("unit", "7", 7),
    ("unit", "8.5", 8.5),
    ("zone", "null", None),
    ("zone", "None", None),
    ("zone", "7", "7"),
    ("loop", "7", "7"),
    ("odd", "7", "7"),
    ("unknown", "7", "7"),
]


@pytest.mark.parametrize(("key", "value", "expected"), VALUES, ids=str)
def test_a_value_has_the_type_of_the_tools_schema(key: str, value: str, expected: Any) -> None:
    raw = msgspec.json.decode(json.dumps(TOOLS), type=dict[str, dict[str, msgspec.Raw] | None])  # as HTTP has them
    for offered in (TOOLS, raw):
        parser = registered.load(registered.TOOLS, "qwen3_coder")(offered)
        ((_, arguments),) = [*parser.feed(xml((key, value))), *parser.finish()]
        found = json.loads(arguments)[key]
        assert found == expected and type(found) is type(expected)


ROME = ToolCall("get_weather", '{"city": "Rome", "days": 2}')
XML = xml(("city", "Rome"), ("days", "2"))
QWEN: list[tuple[str, Said]] = [
    (XML, [ROME]),
    (
        f"Hm.\n</think>\n\nLet me look.\n\n{XML}\n{xml(name='now')}",
        [Thought("Hm."), "Let me look.", ROME, ToolCall("now", "{}")],
    ),
    (f"{XML}\nSo <b> it is.", [ROME, "So <b> it is."]),
    (XML.replace("\n", ""), [ROME]),
    (XML.removesuffix("\n</tool_call>"), [ROME]),
    (XML.replace("</function>\n", ""), [ROME]),
    (XML.removeprefix("<tool_call>\n"), [ROME]),
    (XML.replace("Rome\n</parameter>\n", "Rome\n"), [ROME]),
    (XML.replace("2\n</parameter>\n", "2\n"), [ROME]),
    (xml(("city", "a</parameter>b"), ("days", "2")), [ToolCall("get_weather", '{"city": "a", "days": 2}')]),
    (xml(("days", "1"), ("days", "2")), [ToolCall("get_weather", '{"days": 2}')]),
    (xml(name="unknown"), [ToolCall("unknown", "{}")]),
    ("Write <function=unknown>\n</function>", ["Write <function=unknown>\n</function>"]),
    (XML.replace("=get_weather", "="), [XML.replace("=get_weather", "=")]),
    ('<tool_call>\n{"name": "now"}\n</tool_call>', ['<tool_call>\n{"name": "now"}\n</tool_call>']),
    (XML.replace("<parameter", "Rome<parameter", 1), [XML.replace("<parameter", "Rome<parameter", 1)]),
    (f"<tool_call>\n{XML}", ["<tool_call>", ROME]),
    *((XML[:end], [XML[:end]]) for end in (8, 20, 34, 50, 80, len(XML) - 16)),
]


@pytest.mark.parametrize(("text", "expected"), QWEN, ids=lambda value: str(value)[-30:])
def test_what_qwen_says(text: str, expected: Said) -> None:
    opened = "</think>" in text
    for seed in range(CUTS):
        assert said("think", "qwen3_coder", opened, cut(text, seed)) == expected, seed
