"""The private directory of a running engine, where its sockets are: made, found and removed.

A directory that lacks an engine's name, owner, mode or lock file is neither read nor removed."""

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
_LOCK = "lock"  # the supervisor holds it; if nobody does, the engine is dead
_MAGIC = b"ssd run directory 1\n"  # written to the lock once it is held
ABOUT = "about.json"
# Files that an engine's processes make there, beside the lock (`ssd.ipc.sockets`, `.running`, `ssd.verifier.ranks`).
_MADE = re.compile(r"(client|engine|supervisor|telemetry|link|rank-\d+)\.sock|ranks-\d+|about\.json")


@contextmanager
def run_directory() -> Iterator[Path]:
    """Yield a new run directory and remove it at the end; remove those of dead engines first.

    Its sockets' addresses stay under the kernel's limit of 107 bytes. Raises SsdError if there is no place for one."""
    import fcntl
    import tempfile

    parent = _parent()
    for left in parent.glob(f"{_PREFIX}*"):
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
    found = []
    for directory in sorted(_parent().glob(f"{_PREFIX}*")):
        if (lock := _lock_of(directory)) is not None:
            os.close(lock)
            found.append(directory)
    return found


def remove(directory: Path) -> None:
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


def _remove_if_dead(directory: Path) -> None:
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
    """Return a descriptor of the directory's lock; None unless this user's engine made it. Never block."""
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
