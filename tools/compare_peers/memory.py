"""Measures what a process and all that it started hold in memory, each page counted once."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from tools.soak.processes import children

# Of a mapping: addresses, permissions, then offset, device and inode, which is 0 for no file.
_HEAD = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ (\S+) (\S+) (\d+)")


def resident_mib(pid: int) -> float:
    """Return MiB of `pid` and its descendants: their own pages, and of every file the most that one of them holds.

    Shared memory counts as a file. Other programs that map the same library do not make it smaller."""
    own, files = 0, dict[tuple[str, ...], int]()
    for process in _tree(pid):
        with suppress(OSError):  # it has just ended
            for mapping, kib in _mappings(process).items():
                files[mapping] = max(files.get(mapping, 0), kib)
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
            own += int(re.findall(r"^Pss_Anon: +(\d+)", rollup, re.MULTILINE)[0])
    return (own + sum(files.values())) / 1024


def _tree(pid: int) -> list[int]:
    return [pid, *(process for child in children(pid) for process in _tree(child))]


def _mappings(pid: int) -> dict[tuple[str, ...], int]:
    """Return the resident KiB of each part of a file, without pages copied on write."""
    found: dict[tuple[str, ...], int] = {}
    key, resident = tuple[str, ...](), 0
    for line in Path(f"/proc/{pid}/smaps").read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if head := _HEAD.match(line):
            key = head.groups()
        elif name == "Rss":
            resident = int(value.split()[0])
        elif name == "Anonymous" and key[-1] != "0":
            found[key] = max(found.get(key, 0), resident - int(value.split()[0]))
    return found
