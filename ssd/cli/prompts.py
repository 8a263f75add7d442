"""Reads prompts from files of JSON lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ssd.errors import UsageError
from ssd.system.files import read_bounded

_MAX_BYTES = 2**30


def read_prompts(file: Path) -> Iterator[tuple[str, str]]:
    """Yield ("FILE, line N", prompt) of each line of a JSONL file: its `prompt`, or the first of `turns`.

    Raises UsageError for a bad file or line."""
    try:
        text = read_bounded(file, _MAX_BYTES, pipe=True).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read {file}: not UTF-8 at byte {error.start}") from None
    lines = text.split("\n")  # splitlines() would also split at other characters
    if not any(map(str.strip, lines)):
        raise UsageError(f"{file} holds no prompts")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{file}, line {number}"
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{where}: not JSON: {error}") from None
            yield where, prompt_of(entry, ("prompt", "turns"), where)


def prompt_of(entry: Any, columns: tuple[str, ...], where: str) -> str:
    """Return the first of `columns` that `entry` has: a text, or the first text of a list."""
    column = next((name for name in columns if isinstance(entry, dict) and name in entry), None)
    prompt = entry[column] if column else None
    if isinstance(prompt, list) and prompt:
        prompt = prompt[0]
    if prompt == "":
        raise UsageError(f"{where}: the prompt is empty")
    if not isinstance(prompt, str):
        others = ", ".join(f'"{name}"' for name in columns[1:])
        raise UsageError(f'{where}: expected an object with a "{columns[0]}" of text, or with {others}')
    return prompt
