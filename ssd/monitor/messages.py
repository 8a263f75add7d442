"""What an engine publishes to whoever watches it, ten times a second."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ssd.ipc.messages import Count, Message, Name
from ssd.ipc.supervision import Report, Seconds
from ssd.monitor.lanes import CAPACITY, LANES, Role
from ssd.params import Speculation

_RECORD_BYTES = 32
ProcessState = Literal["starting", "up", "down"]


class Process(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One process of the engine: "down" is one that has ended and will be replaced, or not. `beat_age` is how long its
    loop has shown no sign of life."""

    role: Name
    pid: Count
    state: ProcessState
    rss_bytes: Count = 0
    beat_age: Seconds = 0.0


class LaneNews(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Records of one lane (`ssd.monitor.lanes`), in order, as native 64-bit words."""

    role: Role
    records: Annotated[bytes, Meta(max_length=CAPACITY * _RECORD_BYTES)]


class Snapshot(Message, frozen=True):
    """`engine` is another one for every start of an engine. `at` is CLOCK_MONOTONIC in ns, as all times are. `whole`:
    the lanes have everything that is still known, not only what is new since the last snapshot."""

    engine: Name
    at: Count
    model: Name
    draft: Name
    speculation: Speculation
    whole: bool
    processes: Annotated[list[Process], Meta(max_length=16)]
    lanes: Annotated[list[LaneNews], Meta(max_length=len(LANES))]
    reports: Annotated[list[Report], Meta(max_length=16)]


SNAPSHOTS = msgspec.msgpack.Decoder(Snapshot)
