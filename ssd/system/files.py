"""The cache folder, its locks, and bounded reads of files that people and models name."""

from __future__ import annotations

import fcntl
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ssd.errors import UsageError

_PART_BYTES = 2**20


def cache_dir() -> Path:
    """Return `$SSD_CACHE`, else `$XDG_CACHE_HOME/ssd`, else `~/.cache/ssd`. It may not exist yet."""
    if own := os.environ.get("SSD_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ssd"


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the file lock; the kernel drops it when this process ends, however it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process, which holds {path}", file=sys.stderr)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def read_bounded(path: Path, most: int, pipe: bool = False) -> bytes:
    """Return all of a regular file; with `pipe`, also of a pipe that somebody writes to, as in `--config <(...)`.

    Raises UsageError for any other kind of file, for one that cannot be read, and for more than `most` bytes."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # not to wait for a pipe's writer
        with os.fdopen(descriptor, "rb") as file:
            about = os.fstat(descriptor)
            is_pipe = pipe and stat.S_ISFIFO(about.st_mode)
            if not is_pipe and not stat.S_ISREG(about.st_mode):
                raise UsageError(f"{path} is no regular file")
            os.set_blocking(descriptor, True)
            content = _all_of(file, most + 1) if about.st_size <= most else None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    if content is None or len(content) > most:
        raise UsageError(f"{path} is larger than {most} bytes")
    if is_pipe and not content:
        raise UsageError(f"{path} is a pipe to which nobody writes")
    return content


def _all_of(file: BinaryIO, most: int) -> bytes:
    # One `read(most)` would allocate `most` bytes at once.
    parts, left = [], most
    while left and (part := file.read(min(left, _PART_BYTES))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
