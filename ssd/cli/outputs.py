"""Files that commands write, looked at before the work is done."""

from __future__ import annotations

import os
from pathlib import Path

from ssd.errors import UsageError


def check_writable(flag: str, file: Path | None) -> None:
    """Raises UsageError for a file, given with `flag`, that could not be written now."""
    if file is None:
        return
    if file.is_dir():
        raise UsageError(f"{flag} {file}: it is a folder")
    if not file.parent.is_dir():
        raise UsageError(f"{flag} {file}: {file.parent} is no folder")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise UsageError(f"{flag} {file}: this user may not write there")
