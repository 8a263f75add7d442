"""The cores that target and draft run on."""

from __future__ import annotations

import math
import os
import re
import socket
import zlib

from ssd.config.engine import Cpus
from ssd.errors import UsageError
from ssd.system import cgroups


def placement(
    target_cpus: str | None, draft_cpus: str | None, ranks: int, has_draft: bool, on_gpu: bool
) -> tuple[Cpus, Cpus]:
    """Return the cores of target and draft; empty: the system chooses. Raises UsageError.

    They are disjoint, unless the given lists overlap or every core has a rank. `on_gpu`: only the draft is on the CPU,
    and each of the target's `ranks` gets two cores for its threads, together at most half."""
    allowed = usable()
    if ranks > len(allowed):
        raise UsageError(f"--tensor-parallel-size {ranks} needs as many cores; this process may use {len(allowed)}")
    target = parsed("--target-cpus", target_cpus, allowed)
    draft = parsed("--draft-cpus", draft_cpus, allowed)
    if len(allowed) == 1:
        only = () if len(os.sched_getaffinity(0)) == 1 else allowed
        return target or only, draft or only
    if not has_draft:
        return target or allowed, ()
    if target is None and draft is None:
        most = min(2 * ranks, len(allowed) // 2) if on_gpu else len(allowed) - max(1, len(allowed) // 4)
        cut = max(ranks, most)
        return allowed[:cut], allowed[cut:] or allowed[-1:]
    return (
        tuple(cpu for cpu in allowed if cpu not in (draft or ())) if target is None else target,
        tuple(cpu for cpu in allowed if cpu not in (target or ())) if draft is None else draft,
    )


def usable() -> Cpus:
    """Return the cores that this process may use, no more than its container's quota.

    If the quota is lower, a hash of the host name picks them, so that containers on one machine take different ones."""
    allowed = sorted(os.sched_getaffinity(0))
    quota = cgroups.cpu_quota()
    if quota is None or quota >= len(allowed):
        return tuple(allowed)
    first = zlib.crc32(socket.gethostname().encode()) % len(allowed)
    return tuple(sorted((allowed[first:] + allowed[:first])[: max(1, math.floor(quota))]))


def parsed(flag: str, text: str | None, allowed: Cpus) -> Cpus | None:
    """Return (0, 1, 2, 5) for "0-2,5". Raises UsageError for cores that are not `allowed`."""
    if text is None:
        return None
    cpus: set[int] = set()
    for part in text.split(","):
        bounds = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
        if bounds is None:
            raise UsageError(f"{flag} {text!r}: expected core numbers such as 0-2,5")
        cpus.update(range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1))
    if not cpus or not cpus <= set(allowed):
        raise UsageError(f"{flag} {text!r}: this process may use the cores {', '.join(map(str, allowed))}")
    return tuple(sorted(cpus))
