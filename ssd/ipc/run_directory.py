"""The private directory of a running engine, where its sockets are: made, found, and removed.

It is known by its name, its owner, its mode and what its lock file says. A directory that lacks one of these belongs to
somebody else: it is neither asked nor removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ssd.errors import SsdError

_PREFIX = "ssd-"
_NAME = re.compile(r"ssd-[a-z0-9_]{8}")  # as tempfile.mkdtemp makes it
_LOCK = "lock"  # held by the supervisor: where nobody holds it, the engine is dead
_MAGIC = b"ssd run directory 1\n"  # written to the lock once it is held
# What the processes of an engine make there, beside the lock (`ssd.ipc.sockets`, `ssd.target.ranks`).
_MADE = re.compile(r"(client|engine|supervisor|telemetry|rank-\d+)\.sock|ranks-\d+")


@contextmanager
def run_directory() -> Iterator[Path]:
    """A directory in which the addresses of sockets stay under the kernel's limit of 107 bytes; removed at the end.

    Engines remove theirs however they end, unless all of their processes are killed at once. What such a one has left
    goes now. Raises `SsdError` where there is no place for it.
    """
    import fcntl
    import tempfile

    parent = _parent()
    for left in _of_engines(parent):
        _remove_if_dead(left)
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    lock = os.open(directory / _LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, _MAGIC)
    try:
        yield directory
    finally:
        remove(directory)
        os.close(lock)


def run_directories() -> list[Path]:
    """Those of all engines of this user that were started with an environment like this one, dead ones that left theirs
    included."""
    return _of_engines(_parent())


def remove(directory: Path) -> None:
    """Remove what an engine has made in its run directory, and the directory if nothing else is in it. Files that are
    gone already are no error."""
    try:
        folder = os.open(directory, os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        for name in (*filter(_MADE.fullmatch, os.listdir(folder)), _LOCK):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
        with contextlib.suppress(OSError):
            directory.rmdir()
    finally:
        os.close(folder)


def _of_engines(parent: Path) -> list[Path]:
    return [directory for directory in sorted(parent.glob(f"{_PREFIX}*")) if _is_engines(directory)]


def _is_engines(directory: Path) -> bool:
    """Whether it is the run directory of an engine of this user. Never blocks."""
    lock = _lock_of(directory)
    if lock is not None:
        os.close(lock)
    return lock is not None


def _remove_if_dead(directory: Path) -> None:
    """Remove the run directory of an engine if nobody holds its lock."""
    import fcntl

    lock = _lock_of(directory)
    if lock is None:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove(directory)
    except BlockingIOError:
        pass
    finally:
        os.close(lock)


def _lock_of(directory: Path) -> int | None:
    """A descriptor of its lock; None where it is not the run directory of an engine of this user. Never blocks."""
    try:
        about = directory.lstat()
        private = stat.S_ISDIR(about.st_mode) and stat.S_IMODE(about.st_mode) == 0o700
        if not (_NAME.fullmatch(directory.name) and private and about.st_uid == os.geteuid()):
            return None
        lock = os.open(directory / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(lock).st_mode) and os.pread(lock, len(_MAGIC) + 1, 0) == _MAGIC:
        return lock
    os.close(lock)
    return None


def _parent() -> Path:
    import tempfile

    for parent in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if parent and len(os.fsencode(parent)) <= 60 and os.access(parent, os.W_OK | os.X_OK):
            return Path(parent)
    raise SsdError("no writable directory with a short path for the engine's sockets (tried TMPDIR and /tmp)")
