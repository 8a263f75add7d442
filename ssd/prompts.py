"""Prompts in a file: JSON lines, each an object with a `prompt`, or with the `turns` of a conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ssd.errors import UsageError
from ssd.files import read_bounded

_MOST_BYTES = 2**30


def read_prompts(file: Path) -> Iterator[tuple[str, str]]:
    """Where a prompt stands ("FILE, line N"), and the prompt: of `turns` the first. Raises UsageError for a file that
    cannot be read, holds no prompts, or has a line that is something else."""
    try:
        text = read_bounded(file, _MOST_BYTES, pipe=True).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read {file}: not UTF-8 at byte {error.start}") from None
    lines = text.split("\n")  # not splitlines, which takes more than newlines
    if not any(map(str.strip, lines)):
        raise UsageError(f"{file} holds no prompts")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield (where := f"{file}, line {number}"), _prompt(line, where)


def _prompt(line: str, where: str) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not JSON: {error}") from None
    if isinstance(entry, dict):
        turns = entry.get("turns")
        prompt = entry.get("prompt", turns[0] if isinstance(turns, list) and turns else None)
        if isinstance(prompt, str):
            if not prompt:
                raise UsageError(f"{where}: the prompt is empty")
            return prompt
    raise UsageError(f'{where}: expected an object with a "prompt" of text, or with "turns"')
