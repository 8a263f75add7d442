"""`ssd launch` of a small model as a process, and the processes under it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.scripted_engine import PATIENCE_S, SMALL

SMALL_MODEL = tuple(word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", value))


def command(*arguments: str | Path, engine: Sequence[str] = SMALL_MODEL) -> list[str]:
    return [sys.executable, "-c", "from ssd.cli.main import main; main()", "launch", *engine, *map(str, arguments)]


@contextmanager
def running(*arguments: str | Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """The process, and what it said when it was ready: name -> address."""
    process = subprocess.Popen(command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    said: dict[str, str] = {}
    try:
        assert process.stdout is not None and process.stderr is not None
        while "ready" not in said:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            name, _, address = line.strip().partition(": ")
            said[name] = address
        yield process, said
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
