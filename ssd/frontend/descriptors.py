"""How many descriptors the frontend may have, and how many of them HTTP leaves alone: libzmq ends a process
that has none left for its sockets."""

from __future__ import annotations

import resource

from ssd.errors import UsageError

_MOST = 65536
_RESERVE = 256  # for ZeroMQ, shared memory and files


def raise_limit() -> None:
    """As many as this process may have, up to a bound: the usual soft limit is for programs with select."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def for_connections(wanted: int) -> int:
    """How many of so many HTTP connections may be open at a time. Raises UsageError if none may."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    if soft <= _RESERVE:
        raise UsageError(f"HTTP needs more than {_RESERVE} open files (ulimit -n), and this process may have {soft}")
    return min(wanted, soft - _RESERVE)
