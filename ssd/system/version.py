"""The version, and the commit that this code is from."""

from __future__ import annotations

import subprocess
from pathlib import Path

from ssd import __version__

TESTED_TRANSFORMERS = "5.24"
"""The version of transformers that the families are compared with."""
COMMIT_FILE = "COMMIT"
"""The file in the package of a wheel or an sdist with the commit it was made from. `setup.py` writes it."""

_PACKAGE = Path(__file__).resolve().parents[1]


def commit() -> str:
    """Return the commit in short, with `-dirty` if files of the checkout have changed; empty if it is not known."""
    checkout = _PACKAGE.parent
    if (checkout / ".git").exists():
        command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--exclude", "*", "--abbrev=10"]
        try:
            return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return ""
    try:
        return (_PACKAGE / COMMIT_FILE).read_text().strip()
    except OSError:
        return ""


def described() -> str:
    found = commit()
    return f"{__version__} ({found})" if found else __version__
