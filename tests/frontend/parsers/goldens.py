"""Checks of whole answers as models write them: the formats, and what is read of each text, are those of the tests.

The shapes are those of the models' chat templates and of answers that people have reported. Each golden is a text and
what is read of it, content and calls in their order. `BARE` has those of every format whose calls are JSON."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
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
NOW = ToolCall("now", "{}")
CODE = r'{"path": "a b.py", "text": "print(\"{}]\")\n```json\n</tool_call>", "options": {"x": [1, {"ü": null}]}}'
WRITE = ToolCall("write_file", CODE)


def bare(call: ToolCall, key: str = "arguments") -> str:
    return f'{{"name": "{call.name}", "{key}": {call.arguments}}}'


def indented(call: ToolCall) -> str:
    return f'{{\n  "name": "{call.name}",\n  "arguments": {call.arguments}\n}}'


Golden: TypeAlias = tuple[str, list[Piece]]
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
