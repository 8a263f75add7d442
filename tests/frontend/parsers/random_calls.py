"""Random answers with calls, of any format, and checks of its parser: the formats are those of the tests that call."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest

from ssd.frontend.parsers.source import MAX_DEPTH, Source
from ssd.frontend.parsers.tools import Piece, ToolCall, ToolParser
from ssd.system import registered

Calls: TypeAlias = Sequence[tuple[str, dict[str, Any]]]
Writer: TypeAlias = Callable[[random.Random, str, Calls], str]
"""Writes calls after each other, as a model of a format says them anywhere in an answer."""
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


def formats_of(folder: Path) -> dict[str, Any]:
    """Return formats.json: of each format its markers, a call that disobeys, the start of one, and almost calls."""
    found: dict[str, Any] = json.loads((folder / "formats.json").read_text())
    return found


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


def made(random: random.Random, format: str, broken: Sequence[str], written: Writer) -> Made:
    """A random answer: text, calls and what is almost a call, in any order."""
    text, content, calls = "", "", []
    for _ in range(random.randrange(1, 5)):
        kind = random.random()
        if kind < 0.5:
            some = [call(random) for _ in range(random.randrange(1, 4))]
            text, calls = text + written(random, format, some), calls + some
            text += random.choice(("", "\n"))
        else:
            part = random.choice(broken if kind < 0.7 else TEXTS)
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


def check_cuts(format: str, answers: int, broken: Sequence[str], written: Writer) -> None:
    """No cut changes an answer, and nothing of it is lost."""
    chance = random.Random(format)
    for _ in range(answers):
        answer = made(chance, format, broken, written)
        whole, pieces = parsed(format, [answer.text]), ordered(format, [answer.text])
        assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == answer.calls, answer.text
        assert bare(whole.content) == answer.content, answer.text
        for _ in range(5):
            assert ordered(format, cut(chance, answer.text)) == pieces, answer.text


def check_noise(format: str, broken: Sequence[str]) -> None:
    """Noise is content to the letter."""
    chance = random.Random(format)
    parts = [*broken, *TEXTS, *"{}[]()<>\"'\\,:;=|", "add", '"name"', '{"name": "add", ', "add(a=", "\n"]
    for _ in range(1000):
        text = "".join(chance.choices(parts, k=chance.randrange(12)))
        whole = parsed(format, [text])
        assert parsed(format, cut(chance, text)) == whole
        if not whole.calls:
            assert whole.content == text


def check_bounds(format: str, start: str, deep: str) -> None:
    """Neither brackets without end nor a long unfinished call, after its `start`, cost more than their length."""
    text = start + deep * 100_000
    assert parsed(format, [text[i : i + 50] for i in range(0, len(text), 50)]) == Parsed(text, [])
    text = start + deep * (MAX_DEPTH // 2) + '"' + "x" * 500_000
    assert parsed(format, [text[i : i + 5] for i in range(0, len(text), 5)]) == Parsed(text, [])


def copied(format: str, text: str, calls: int) -> int:
    """The characters that a parser copies while it reads a text with so many calls."""
    copies, span = 0, Source.span

    def counting(source: Source) -> str:
        nonlocal copies
        text = span(source)
        copies += len(text)
        return text

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Source, "span", counting)
        assert len(parsed(format, [text]).calls) == calls
    return copies
