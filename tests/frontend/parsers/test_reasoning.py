"""Thoughts in front of an answer, whatever the pieces of its text are."""

from __future__ import annotations

import itertools

import pytest

from ssd.frontend.parsers.answer import Answer, AnswerParser, joined
from ssd.frontend.parsers.marked import Hermes
from ssd.frontend.parsers.reasoning import ReasoningParser, Thought
from ssd.frontend.parsers.tools import Piece, ToolCall
from ssd.system import registered

CALL = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'


def parsed(text: str, size: int, opened: bool = False) -> Answer:
    reasoning: ReasoningParser = registered.load(registered.REASONING, "think")(opened)
    parser = AnswerParser(reasoning, Hermes({"add": None}))
    parts = [parser.feed(text[start : start + size]) for start in range(0, len(text), size)]
    return joined([*parts, parser.finish("")])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "opened", "thoughts", "pieces"),
    [
        ("<think>\nHm.\n\nSo.\n</think>\n\nYes.", False, "Hm.\n\nSo.", ["Yes."]),
        ("Hm.</think>Yes.", True, "Hm.", ["Yes."]),
        ("<think>Hm.</think>Yes.", True, "Hm.", ["Yes."]),
        ("<think></think>\n\nYes.", False, "", ["Yes."]),
        (" Yes. <think>no</think>", False, "", [" Yes. <think>no</think>"]),
        ("<think>Hm. </thi", False, "Hm. </thi", []),
        ("<thin", False, "", ["<thin"]),
        ("Hm.", True, "Hm.", []),
        (f"<think>{CALL}</think>{CALL}", False, CALL, [ToolCall("add", "{}")]),
        (f"Yes. {CALL} So.", False, "", ["Yes.", ToolCall("add", "{}"), " So."]),
    ],
)
def test_thoughts_are_divided_from_the_answer(
    text: str, opened: bool, thoughts: str, pieces: list[Piece], size: int
) -> None:
    answer = parsed(text, size, opened)
    merged: list[Piece] = []
    said = [piece for piece in answer.pieces if not isinstance(piece, Thought)]
    for calls, group in itertools.groupby(said, lambda piece: isinstance(piece, ToolCall)):
        alike = list(group)
        merged += alike if calls else ["".join(map(str, alike))]
    assert (answer.reasoning, merged) == (thoughts, pieces)


def test_a_template_says_its_marks() -> None:
    for template, name in (("</think>", "think"), ("{{ messages }}", "")):
        assert registered.fitting(registered.REASONING, template) == name


def test_white_space_without_end_costs_no_more_than_its_length() -> None:
    """Joining it again with each piece would copy 400 GB."""
    reading, spaces = registered.load(registered.REASONING, "think")(True), ["\n   "] * 450_000
    parts = [part for text in ["x", *spaces, "y", *spaces, "</think>z"] for part in reading.feed(text)]
    assert parts == [Thought("x"), Thought(f"{''.join(spaces)}y"), "z"]
