"""The private directory of a running engine, where its sockets are: made, found, and removed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ssd.errors import SsdError

_PREFIX = "ssd-"
_LOCK = "lock"  # held by the supervisor: where nobody holds it, the engine is dead


@contextmanager
def run_directory() -> Iterator[Path]:
    """A directory in which the addresses of sockets stay under the kernel's limit of 107 bytes; removed at the end.

    Engines remove theirs however they end, unless all of their processes are killed at once. What such a one has left
    goes now. Raises `SsdError` where there is no place for it.
    """
    parent = _parent()
    for left in _of_engines(parent):
        _remove_if_dead(left)
    directory, lock = _locked(parent)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def run_directories() -> list[Path]:
    """Those of all engines that were started with an environment like this one, dead ones that left theirs included."""
    return _of_engines(_parent())


def _of_engines(parent: Path) -> list[Path]:
    return sorted(parent.glob(f"{_PREFIX}*"))


def _locked(parent: Path) -> tuple[Path, int]:
    """A new directory and its lock, held."""
    import fcntl
    import tempfile

    while True:
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        lock = os.open(directory / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if directory.exists():
            return directory, lock
        os.close(lock)  # another engine was quicker to lock it, and took it for a dead one's


def _remove_if_dead(directory: Path) -> None:
    """Remove a directory of this user's if nobody holds its lock; without a lock it is not an engine's."""
    import fcntl

    try:
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        if os.fstat(lock).st_uid == os.geteuid():
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(lock)


def _parent() -> Path:
    import tempfile

    for parent in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if parent and len(os.fsencode(parent)) <= 60 and os.access(parent, os.W_OK | os.X_OK):
            return Path(parent)
    raise SsdError("no writable directory with a short path for the engine's sockets (tried TMPDIR and /tmp)")
