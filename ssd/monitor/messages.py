"""Messages that an engine publishes to its watchers, ten times a second."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ssd.config.params import Speculation
from ssd.ipc.messages import FrontendReport, InternalMessage, Seconds, internal
from ssd.ipc.public import Count, Name
from ssd.ipc.trace_ring import CAPACITY, RECORD_BYTES, TRACED, Role

ProcessState = Literal["starting", "up", "down", "parked"]


class Process(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process of the engine; `parked`: a draft that has ended because it was not used; `beat_age` is in seconds."""

    role: Name
    pid: Count
    state: ProcessState
    rss_bytes: Count = 0
    beat_age: Seconds = 0.0


class TraceNews(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Records of one trace ring (`ssd.ipc.trace_ring`), in order, as native 64-bit words."""

    role: Role
    records: Annotated[bytes, Meta(max_length=CAPACITY * RECORD_BYTES)]


class Snapshot(InternalMessage, frozen=True):
    """The state of an engine at `at` (CLOCK_MONOTONIC in ns, like all times).

    `engine` differs for every start of an engine. With `whole`, `traces` has every record that is still known, not only
    news. Without `kernels` a CPU computes by torch alone."""

    engine: Name
    at: Count
    model: Name
    draft: Name
    speculation: Speculation
    whole: bool
    processes: Annotated[list[Process], Meta(max_length=16)]
    traces: Annotated[list[TraceNews], Meta(max_length=len(TRACED))] = msgspec.field(name="lanes")
    reports: Annotated[list[FrontendReport], Meta(max_length=16)]
    kernels: bool = True


SNAPSHOTS = internal(Snapshot)
