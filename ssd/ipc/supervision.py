"""What the supervisor and its children tell each other, as `ssd.ipc.messages` has it: bounded, without pickle."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ssd.ipc.messages import Count, Load, Message, Metrics, Name, RequestId

Seconds = Annotated[float, Meta(ge=0, le=86400)]
MAX_ROUNDS, MAX_ENDED = 8192, 1024

# -- child -> supervisor --------------------------------------------------------------------------------------------


class Status(Message, frozen=True):
    """A child's word about itself; `failed` carries its own cause and the exit code that the cause deserves."""

    role: Name
    state: Literal["ready", "failed", "stopped"]
    message: Annotated[str, Meta(max_length=65536)] = ""
    exit_code: Annotated[int, Meta(ge=0, le=255)] = 0


class Loading(Message, frozen=True):
    """How many bytes of its weights a child has read, of how many."""

    done: Count
    total: Count


class Round(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What one step gave one request (see `ssd.ipc.messages.Emission`), as the frontend saw it at `at` (monotonic ns).
    `first` is that of the prefill, which verifies nothing."""

    at: Count
    request: RequestId
    tokens: Count
    drafted: Count
    accepted: Count
    cache: Name
    first: bool


class Ended(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A request that ended at `at` (monotonic ns) for `reason`. `metrics` are those its client gets: without figures
    where the target has not told the end."""

    at: Count
    request: RequestId
    prompt_tokens: Count
    completion_tokens: Count
    reason: Name
    metrics: Metrics


class Report(Message, frozen=True):
    """Frontend -> supervisor, while someone watches: what has happened since the last report. `dropped` counts what
    would have been too much for one message."""

    load: Load
    open_requests: Count
    state: Name
    rounds: Annotated[list[Round], Meta(max_length=MAX_ROUNDS)]
    ended: Annotated[list[Ended], Meta(max_length=MAX_ENDED)]
    dropped: Count = 0


# -- supervisor -> frontend -----------------------------------------------------------------------------------------


class Drain(Message, frozen=True):
    """Refuse new requests, finish the open ones within so many seconds and end the rest, then answer with status
    `stopped`."""

    seconds: Seconds


class TargetLost(Message, frozen=True):
    """The target has died, and with it what its requests had come to. Another one is started, unless the engine
    drains."""


class Watch(Message, frozen=True):
    """Someone watches: report for so many seconds, from now on. Said again in time, as long as that is so."""

    seconds: Seconds


CHILD_TO_SUPERVISOR = msgspec.msgpack.Decoder(Status | Loading | Report)
SUPERVISOR_TO_CHILD = msgspec.msgpack.Decoder(Drain | TargetLost | Watch)
