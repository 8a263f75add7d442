"""Checks of whole answers as models write them: the formats, and what is read of each text, are those of the tests.

The shapes are those of the models' chat templates and of answers that people have reported. Each golden is a text and
what is read of it, content and calls in their order: goldens.json, whose `bare` are of every format in JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ssd.frontend.parsers.rules import CallableFunction, argument_check
from ssd.frontend.parsers.tools import Piece, ToolCall, ToolParser
from ssd.system import registered

TOOLS: dict[str, Any] = {
    "get_weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "write_file": {"properties": {"path": {"type": "string"}, "text": {"type": "string"}, "options": {}}},
    "now": None,
}
ROME = ToolCall("get_weather", '{"city": "Rome", "days": 2}')
TOKYO = ToolCall("get_weather", '{"city": "東京 🗼"}')


def bare(call: ToolCall) -> str:
    return f'{{"name": "{call.name}", "arguments": {call.arguments}}}'


Golden: TypeAlias = tuple[str, list[Piece]]
R, T = bare(ROME), bare(TOKYO)
OTHER = '{"name": "other", "arguments": {"city": "Rome"}}'


def piece(part: Any) -> Piece:
    return part if isinstance(part, str) else ToolCall(*part)


def goldens_of(folder: Path, json_formats: Sequence[str]) -> dict[str, list[Golden]]:
    """Return the goldens of goldens.json by format; those of `bare` in this folder are of every format in JSON."""

    def read(file: Path) -> dict[str, list[Golden]]:
        return {
            name: [
                (text, [part if isinstance(part, str) else ToolCall(*part) for part in parts]) for text, parts in some
            ]
            for name, some in json.loads(file.read_text()).items()
        }

    bare, found = read(Path(__file__).with_suffix(".json"))["bare"], read(folder / "goldens.json")
    return {name: [*bare, *some] if name in json_formats else some for name, some in found.items() if name != "bare"}


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


def check_cuts(goldens: Mapping[str, Sequence[Golden]], cuts: int) -> None:
    """What was told is at every moment the beginning of what the whole answer says: no text of a call is in it."""
    chance, done = random.Random(0), 0
    every = [(format, *golden) for format, some in goldens.items() for golden in some]
    lost, leaked = [], []
    while done < cuts:
        for format, text, expected in every:
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


def check_golden(format: str, text: str, expected: list[Piece]) -> None:
    """An answer without calls is content to the letter."""
    reading = parser(format)
    told = [*reading.feed(text), *reading.finish()]
    assert joined(told) == [part.strip() if isinstance(part, str) else part for part in expected]
    if not any(isinstance(part, ToolCall) for part in expected):
        assert "".join(map(str, told)) == text


CERTAIN = [
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
]
"""Text, the text after it, and what is told of both at once, as it cannot become a call."""


def check_certain(format: str, text: str, after: str, certain: str) -> None:
    reading = parser(format)
    assert "".join(map(str, [*reading.feed(text), *reading.feed(after)])) == certain


def check_noise(format: str) -> None:
    """Noise around bare calls is the same however it is cut."""
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


def check_exact(format: str) -> None:
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


def check_strict(format: str) -> None:
    """Bare calls of strict tools are those that obey."""
    long = {"properties": {f"n{number}": {"type": "string", "pattern": "^[a-z]+$"} for number in range(200)}}
    many = {"properties": {"a": {"type": "array", "items": {"anyOf": [{"type": "array", "items": {}}] * 150}}}}
    functions = [
        CallableFunction("get_weather", STRICT, True),
        CallableFunction("now", None, True),
        CallableFunction("write_file", long, True),
    ]
    functions.append(CallableFunction("count", many, True))
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
