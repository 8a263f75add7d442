"""Whole answers of gpt-oss and of Qwen 3.5, cut anywhere: the same thoughts, content and calls in the same order."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
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


def read(part: Any) -> Thought | ToolCall | str:
    if isinstance(part, dict):
        return Thought(part["thought"])
    return part if isinstance(part, str) else ToolCall(*part)


ANSWERS: dict[str, list[Any]] = json.loads(Path(__file__).with_name("answers.json").read_text())
HARMONY, QWEN = ([(text, [*map(read, parts)]) for text, parts in ANSWERS[name]] for name in ("harmony", "qwen3_coder"))


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
SAYS = "<|channel|>final<|message|>Sunny, 20°.\n\n- dry<|return|>"


@pytest.mark.parametrize(("text", "expected"), HARMONY, ids=lambda value: str(value)[-30:])
def test_what_gpt_oss_says(text: str, expected: Said) -> None:
    for seed in range(CUTS):
        assert said("harmony", "harmony", True, cut(text, seed)) == expected, seed


def test_an_answer_of_gpt_oss_may_begin_inside_of_a_message() -> None:
    for seed in range(CUTS):
        assert said("harmony", "harmony", False, cut(f"and dry.<|end|>{NEXT}{CALLS}", seed)) == ["and dry.", CALL]


def test_noise_of_gpt_oss_is_the_same_however_it_is_cut() -> None:
    chance = random.Random(0)
    marks = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", " ", "to=", "x<|", "json"]
    parts = [ASKS, CALLS, SAYS, NEXT, *marks]
    for seed in range(500):
        text = "".join(chance.choices(parts, k=chance.randrange(9)))
        whole = said("harmony", "harmony", True, [text])
        assert said("harmony", "harmony", True, cut(text, seed + 1)) == whole, text


# -- Qwen 3.5 -------------------------------------------------------------------------------------------------------


def xml(*parameters: tuple[str, str], name: str = "get_weather") -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


@pytest.mark.parametrize(("key", "value", "expected"), ANSWERS["values"], ids=str)
def test_a_value_has_the_type_of_the_tools_schema(key: str, value: str, expected: Any) -> None:
    raw = msgspec.json.decode(json.dumps(TOOLS), type=dict[str, dict[str, msgspec.Raw] | None])  # as HTTP has them
    for offered in (TOOLS, raw):
        parser = registered.load(registered.TOOLS, "qwen3_coder")(offered)
        ((_, arguments),) = [*parser.feed(xml((key, value))), *parser.finish()]
        found = json.loads(arguments)[key]
        assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(("text", "expected"), QWEN, ids=lambda value: str(value)[-30:])
def test_what_qwen_says(text: str, expected: Said) -> None:
    opened = "</think>" in text
    for seed in range(CUTS):
        assert said("think", "qwen3_coder", opened, cut(text, seed)) == expected, seed
