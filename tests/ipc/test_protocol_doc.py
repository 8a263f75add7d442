"""docs/protocol.md says what the code does: its tables, its bytes, its codes and its example."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from ssd.client.inboxes import MAX_UNREAD
from ssd.frontend import connection_limits, memory_budget
from ssd.ipc import peer_connections, sockets
from ssd.ipc import public as m
from tests.client.serving import echo, serving
from tests.scripted_engine import PATIENCE_S

ROOT = Path(__file__).parent.parent.parent
DOC = (ROOT / "docs" / "protocol.md").read_text()
PUBLIC = (m.Generate, m.Cancel, m.Describe, m.Description, m.Chunk, m.Done, m.Failed)


def sections() -> dict[str, str]:
    """The text about each structure, by its name: what is under the headings of the third level."""
    parts = re.split(r"^(##+) (.*)$", DOC, flags=re.MULTILINE)
    found = zip(parts[1::3], parts[2::3], parts[3::3], strict=True)
    return {heading: text for level, heading, text in found if level == "###"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOC, re.MULTILINE | re.DOTALL)


# -- the tables -------------------------------------------------------------------------------------------------------


def structures() -> dict[str, inspect.StructType]:
    """Everything that can be part of a public message, by name."""
    found: dict[str, inspect.StructType] = {}

    def visit(part: Any) -> None:
        if isinstance(part, inspect.StructType):
            if part.cls.__name__ in found:
                return
            found[part.cls.__name__] = part
        elif isinstance(part, inspect.Metadata):
            visit(part.type)
        for name in ("fields", "types", "item_types"):
            for inner in getattr(part, name, ()):
                visit(inner.type if isinstance(inner, inspect.Field) else inner)
        for name in ("item_type", "key_type", "value_type"):
            if hasattr(part, name):
                visit(getattr(part, name))

    for message in PUBLIC:
        visit(inspect.type_info(message))
    return found


def number(value: float) -> str:
    """Powers of two as such."""
    for shift in range(16, 64):
        if value in (2**shift, 2**shift - 1):
            return f"2^{shift}" + ("" if value == 2**shift else "-1")
    return f"{value:g}"


def span(low: float | None, above: float | None, high: float | None) -> str:
    if low is None and above is None and high is None:
        return ""
    start = f"above {number(above)}" if above is not None else number(low or 0)
    return f", {start} to {number(high)}" if high is not None else f", {start} or more"


def length(low: int | None, high: int | None, unit: str) -> str:
    if high is None:
        return ""
    return f" of {low} to {number(high)} {unit}" if low else f" of at most {number(high)} {unit}"


def words(kind: Any) -> str:
    """A type with its bounds in the words of the tables."""
    match kind:
        case inspect.Metadata():
            return words(kind.type)
        case inspect.StructType():
            return f"[{kind.cls.__name__}](#{kind.cls.__name__.lower()})"
        case inspect.UnionType():
            return " or ".join(sorted((words(part) for part in kind.types), key=lambda text: text != "nil"))
        case inspect.LiteralType():
            if len(kind.values) > 6:  # they would not fit into a line
                return "one of " + ", ".join(f"`{value}`" for value in kind.values)
            return " or ".join(f'`"{value}"`' for value in kind.values)
        case inspect.IntType():
            return "integer" + span(kind.ge, None, kind.le)
        case inspect.FloatType():
            return "number" + span(kind.ge, kind.gt, kind.le)
        case inspect.StrType():
            pattern = f" like `{kind.pattern}`" if kind.pattern else ""
            return "text" + length(kind.min_length, kind.max_length, "characters") + pattern
        case inspect.BytesType():
            return f"bytes, at most {number(kind.max_length or 0)}"
        case inspect.BoolType():
            return "boolean"
        case inspect.NoneType():
            return "nil"
        case inspect.ListType() | inspect.VarTupleType():
            return f"array{length(None, kind.max_length, 'items')}: {words(kind.item_type)}"
        case inspect.TupleType():
            return f"array of {len(kind.item_types)}: ({'; '.join(words(part) for part in kind.item_types)})"
        case inspect.DictType():
            pair = f"{words(kind.key_type)} -> {words(kind.value_type)}"
            return f"map{length(None, kind.max_length, 'pairs')}: {pair}"
    raise AssertionError(f"the tables have no words for {kind}")


def default(field: inspect.Field) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if isinstance(value, msgspec.Struct):
        return "all defaults"
    return f"`{json.dumps(value)}`" if value is not None else "nil"


def table(structure: inspect.StructType) -> list[str]:
    return [f"| `{field.name}` | {words(field.type)} | {default(field)} |" for field in structure.fields]


@pytest.mark.parametrize("name", structures())
def test_every_field_is_in_its_table_with_its_bounds(name: str) -> None:
    assert name in sections(), f"docs/protocol.md has no section {name}"
    found = re.findall(r"^(\| `\w+` \| .*? \| .*? \|)", sections()[name], re.MULTILINE)
    assert found == table(structures()[name]), "\n".join(
        ["the table should begin like this:", *table(structures()[name])]
    )


def test_no_section_is_about_a_structure_that_is_gone() -> None:
    assert set(sections()) == set(structures())


# -- the numbers, the bytes, the codes --------------------------------------------------------------------------------


def test_limits_and_version_are_those_of_the_code() -> None:
    for name, value in {
        "protocol version": m.PROTOCOL_VERSION,
        "largest frame to the engine, bytes": sockets.PUBLIC_BYTES,
        "largest frame to a client, bytes": sockets.INTERNAL_BYTES,
        "messages in each queue to a client": sockets.HIGH_WATER_MARK,
        "messages in each queue to the engine": sockets.PUBLIC_QUEUE,
        "bytes that wait unread in the transport for a client": peer_connections.UNSENT_BYTES,
        "bytes of a message that does not end": connection_limits.UNREAD_BYTES,
        "bytes of one client's open prompts, and of all": f"{memory_budget.PEER_BYTES}, {memory_budget.ALL_BYTES}",
        "unread tokens of a stream": MAX_UNREAD,
    }.items():
        assert f"| {name} | {value} |" in DOC


def worked_example() -> Iterator[tuple[list[bytes], dict[str, Any]]]:
    """(frames, body) of each message: the header in a line of hexadecimal, the body in the others, then it as JSON."""
    for text, body in zip(blocks("hex"), blocks("json"), strict=True):
        header, rest = text.split("\n", 1)
        yield [bytes.fromhex(header), bytes.fromhex(rest)], json.loads(body)


def within(part: Any, whole: Any) -> bool:
    """Whether `whole` is `part`, with defaults filled in."""
    if isinstance(part, dict):
        return all(key in whole and within(value, whole[key]) for key, value in part.items())
    return bool(part == whole)


def test_the_bytes_of_the_example_are_the_messages_beside_them() -> None:
    seen = set()
    for frames, body in worked_example():
        assert frames == [m.pack(m.Describe(), epoch=frames[0][4])[0], msgspec.msgpack.encode(body)]
        asked = body["type"] in ("Generate", "Cancel", "Describe")
        epoch, message = m.unpack(frames, m.CLIENT_TO_FRONTEND if asked else m.FRONTEND_TO_CLIENT)
        assert (epoch == 0) == asked
        assert within(body, msgspec.to_builtins(message))
        seen.add(type(message))
    assert seen == set(PUBLIC)


def codes() -> set[str]:
    """Every code that the sources give a RequestError or a Failed."""
    found = set()
    for path in [*(ROOT / "ssd" / "frontend").rglob("*.py"), *(ROOT / "ssd" / "client").glob("*.py"),
                 ROOT / "ssd" / "config" / "params.py", ROOT / "ssd" / "errors.py"]:  # fmt: skip
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
                arguments = node.args[:2] if name in ("RequestError", "Failed", "__init__") else []
                found |= {
                    argument.value
                    for argument in arguments
                    if isinstance(argument, ast.Constant) and re.fullmatch("[a-z_]+", str(argument.value))
                }
    return found


def test_every_code_is_explained() -> None:
    assert codes() >= {"invalid_request", "overloaded", "slow_reader", "timeout"}
    for code in codes():
        assert f"| `{code}` |" in DOC, f"docs/protocol.md does not explain the code {code}"


# -- the example client -----------------------------------------------------------------------------------------------


def test_the_example_client_speaks_with_the_real_gateway(tmp_path: Path) -> None:
    (program,) = blocks("python")
    assert "ssd" not in re.findall(r"^(?:import|from) (\w+)", program, re.MULTILINE)
    (tmp_path / "client.py").write_text(program)

    def run(address: str, prompt: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(tmp_path / "client.py"), address, prompt]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)

    with serving(echo) as engine:
        good = run(engine.address, "one two three")
        assert (good.returncode, good.stdout) == (0, "one two three\n"), good.stderr
        assert "scripted" in good.stderr
        bad = run(engine.address, "")
        assert bad.returncode == 1 and "invalid_request: the prompt is empty" in bad.stderr
