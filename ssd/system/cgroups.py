"""Limits on this process by the kernel's control groups (admin-guide/cgroup-v1 and admin-guide/cgroup-v2)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Return the processor time that this process may take, in cores; None: no group limits it."""
    found = []
    for group in _groups("cpu", root):
        quota, period = ([*_words(group / "cpu.max"), "max", "max"])[:2]
        if quota == "max":  # version 1, where -1 means no limit
            quota, period = _first(group / "cpu.cfs_quota_us"), _first(group / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(period):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def available_bytes() -> int:
    """Return the free memory of the host, or of the container if that has less."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found is not None, "/proc/meminfo tells MemAvailable since Linux 3.14"
    free, left = int(found[1]) * 1024, memory_left()
    return free if left is None else min(free, left)


def memory_left(root: Path = _ROOT) -> int | None:
    """Return the bytes left below the lowest limit, counting droppable file cache as free; None without a limit."""
    found = []
    for group in _groups("memory", root):
        limit = _first(group / "memory.max") or _first(group / "memory.limit_in_bytes")
        used = _first(group / "memory.current") or _first(group / "memory.usage_in_bytes")
        if limit.isdecimal() and used.isdecimal() and int(limit) < 2**62:  # version 1 says "none" by a huge number
            found.append(max(0, int(limit) - int(used) + _droppable(group)))
    return min(found, default=None)


def oom_kills(root: Path = _ROOT) -> int:
    """Return the number of out-of-memory kills: in this process's group, else on the whole machine."""
    for group in _groups("memory", root):
        for name in ("memory.events", "memory.oom_control"):
            if (count := _figures(group / name).get("oom_kill")) is not None:
                return int(count)
    return int(_figures(root / "proc/vmstat").get("oom_kill", 0))


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of the groups that this process is in, for both versions, from its own to the outermost.

    A container may see its own group as the outermost one, while /proc names the host's path."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        own = top / path.lstrip("/")
        for folder in (own, *own.parents):
            if not folder.is_relative_to(top):
                break
            yield folder


def _droppable(group: Path) -> int:
    figures = _figures(group / "memory.stat")
    return int(figures.get("total_inactive_file") or figures.get("inactive_file") or 0)


def _figures(file: Path) -> dict[str, str]:
    words = _words(file)
    return dict(zip(words[::2], words[1::2], strict=False))


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def _first(file: Path) -> str:
    return next(iter(_words(file)), "")
