"""The keys that clients of HTTP show."""

from __future__ import annotations

from pathlib import Path

from ssd.errors import UsageError
from ssd.files import read_bounded

_MOST_BYTES = 2**20


def read_keys(path: str) -> list[bytes]:
    """One key a line; UsageError for a file that others can read, and for one without keys."""
    file = Path(path)
    try:
        lines = read_bounded(file, _MOST_BYTES).splitlines()
        mode = file.stat().st_mode
    except (OSError, UsageError) as error:
        raise UsageError(f"--api-key-file: {error}") from None
    if mode & 0o077:
        raise UsageError(f"--api-key-file {path}: others may read it; chmod 600 it")
    keys = [line.strip() for line in lines]
    if not keys or not all(keys):
        raise UsageError(f"--api-key-file {path}: a key, on a line of its own, must not be empty")
    return keys
