"""The internal protocol: the messages between an engine's own processes, as bounded MessagePack.

It has a version of its own, so that it can change without the public protocol (`ssd.ipc.public`)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

from ssd.config.params import CacheSalt, SamplingParams, Speculation, Structured, TokenId
from ssd.ipc import public
from ssd.ipc.public import Count, Logprobs, Message, Metrics, Name, Number, PromptIds, RequestId, Source, Tokens
from ssd.law import Law, Share
from ssd.tuning.costs import NEAR

INTERNAL_VERSION = 133
"""Internal versions count from 128, public ones from 1: a frame on the wrong socket is refused by its version."""

HANDLE_BYTES, UUID_BYTES, MARK_BYTES = 64, 16, 16  # of memory on a GPU
MAX_ROUNDS, MAX_ENDED = 8192, 1024  # events in one report

Seconds = Annotated[float, Meta(ge=0, le=86400)]
DraftState = Literal["down", "up", "open", "half_open", "parked"]
"""`down`: not running. `up`: in use. `open`: unused, by the circuit breaker (`ssd.verifier.draft_session`).
`half_open`: on trial. `parked`: ended because nothing used it, until a plan or a request wants it."""


class InternalMessage(Message, frozen=True):
    version: ClassVar[int] = INTERNAL_VERSION


# -- frontend and draft <-> target: the handshake -------------------------------------------------------------------


class Hello(InternalMessage, frozen=True):
    """First message of a peer to the target.

    A draft that cannot open the GPU memory of `Ready` says hello again with `imports` false: then both sides use host
    memory. A draft `reads` only requests of the clients with these names; None: all."""

    role: Literal["frontend", "draft"]
    imports: bool = True
    reads: list[Name] | None = None


class Readers(InternalMessage, frozen=True):
    """From a receiver whose drafts have changed: the clients they read now, and requests `lost` with their draft."""

    reads: list[Name] | None
    lost: list[RequestId]


class ArenaHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`size` bytes of GPU memory that the target exports under `name`.

    `memory` is CUDA's handle, `gpu` the device's UUID, `mark` the bytes that follow the memory."""

    name: Name
    size: Count
    memory: Annotated[bytes, Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
    gpu: Annotated[bytes, Meta(min_length=UUID_BYTES, max_length=UUID_BYTES)]
    mark: Annotated[bytes, Meta(min_length=MARK_BYTES, max_length=MARK_BYTES)]


class Ready(InternalMessage, frozen=True):
    arenas: Annotated[list[ArenaHandle], Meta(max_length=8)] = msgspec.field(default_factory=list)


# -- frontend <-> target --------------------------------------------------------------------------------------------


class Submit(InternalMessage, frozen=True):
    """A tokenised request, with seed and speculation filled in. `owner`: the client's key, its name, or empty."""

    request: RequestId
    token_ids: PromptIds
    params: SamplingParams
    owner: Name = ""


class Abort(InternalMessage, frozen=True):
    """Forget a request. The target sends no `Emission` for it once it has read this."""

    request: RequestId


class Emission(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The result of one step for one request.

    `finish_reason` ends the request; `error` explains the reason `error`. The step verified `drafted` tokens, which
    `source` proposed, and accepted `accepted` of them. `cache` is the result of the look-up in the speculation cache:
    "hit", the reason of a miss (`ssd.ipc.trace_ring.Mark`), or empty. An `embedding` ends its request."""

    request: RequestId
    token_ids: Tokens
    logprobs: Logprobs | None = None
    finish_reason: public.FinishReason | None = None
    metrics: Metrics | None = None
    error: Name = ""
    drafted: Count = 0
    accepted: Count = 0
    cache: Name = ""
    prompt_logprobs: Logprobs | None = None
    source: Source | Literal[""] = ""
    embedding: public.Embedding | None = None


class LinkLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Figures of the link to a draft on another machine.

    `rtt` is the mean round trip and `jitter` its mean deviation, in seconds. Totals since the receiver started:
    `entries` that arrived, `late` ones that arrived after their verification, `bytes` in both directions, `tokens`
    committed with a draft. `ahead` is the number of tokens that are committed while a speculation travels."""

    rtt: Number
    jitter: Number
    entries: Count
    late: Count
    bytes: Count
    tokens: Count
    ahead: Count


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The target's load after a step.

    `kv_cache_usage` is a share from 0 to 1. `verify_seconds` is the time of this step's forward, `wait_seconds` the
    wait for the draft before it. `plan` says what mode `auto` does, and why. Totals since the target started: board
    entries refused as unsound (`rejected_speculations`), look-ups that found only entries for other rounds
    (`stale_speculations`), the draft's tree steps and their seconds, sequences that lost their pages to others
    (`preemptions`), and kernels compiled after their process was ready (`late_compiles`, `draft_late_compiles`)."""

    running: Count = 0
    waiting: Count = 0
    kv_cache_usage: Number = 0.0
    draft_state: DraftState = "down"
    batched_tokens: Count = 0
    verify_seconds: Number = 0.0
    wait_seconds: Number = 0.0
    rejected_speculations: Count = 0
    draft_steps: Count = 0
    draft_step_seconds: Number = 0.0
    stale_speculations: Count = 0
    preemptions: Count = 0
    plan: Name = ""
    link: LinkLoad | None = None
    late_compiles: Count = 0
    draft_late_compiles: Count = 0


class Step(InternalMessage, frozen=True):
    emissions: Annotated[list[Emission], Meta(max_length=4096)]
    load: Load = Load()


# -- target -> draft ------------------------------------------------------------------------------------------------


class Admit(InternalMessage, frozen=True):
    """Begin or rebuild a sequence from its committed `token_ids`, all that a draft needs.

    `round` is the verification in flight, which carries no draft tokens. If `structured` is given, the tokens after the
    first `prompt_length` obey it."""

    request: RequestId
    slot: Count
    round: Count
    token_ids: PromptIds
    law: Law
    speculation: Speculation
    cache_salt: CacheSalt = ""
    prompt_length: Count = 0
    structured: Structured | None = None
    owner: str = ""


class Verified(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Verification `round` of `request` accepted `accepted` draft tokens and emitted `token` after them.

    `in_flight` tokens of the entry cached for this outcome are now being verified. It is None while the target has not
    decided; a `Launched` follows. In `sd` the target then wants draft tokens only while all are right with the
    probability `least`; 0: it wants K."""

    request: RequestId
    round: Count
    accepted: Count
    token: TokenId
    in_flight: Annotated[int, Meta(ge=0, le=64)] | None
    least: Share = 0.0


class Outcomes(InternalMessage, frozen=True):
    rows: Annotated[list[Verified], Meta(max_length=4096)]


class Launch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Verification `round` has `in_flight` draft tokens: the draft's first, or `tokens` of another source."""

    request: RequestId
    round: Count
    in_flight: Annotated[int, Meta(ge=0, le=64)]
    tokens: Annotated[list[TokenId], Meta(max_length=64)] = []


class Launched(InternalMessage, frozen=True):
    """The rows that `Outcomes` left undecided are now being verified."""

    rows: Annotated[list[Launch], Meta(max_length=4096)]


class Retune(InternalMessage, frozen=True):
    """(request, its speculation from now on): K and fan-outs as the tuner chose them."""

    rows: Annotated[list[tuple[RequestId, Speculation]], Meta(max_length=4096)]


class Release(InternalMessage, frozen=True):
    """Sequences that ended, lost their pages or go on without a draft."""

    requests: Annotated[list[RequestId], Meta(max_length=4096)]


class Rehearse(InternalMessage, frozen=True):
    """Run tree steps of `rows` made-up chains until the next message, for the target to measure; 0 rows end that.

    `in_turn`: the target rests meanwhile, as in mode `sd`. `text`: tokens before the chains, if there is room."""

    rows: Annotated[int, Meta(ge=0, le=64)]
    in_turn: bool = False
    text: Annotated[int, Meta(ge=1, le=2**20)] = NEAR


class Rejoin(InternalMessage, frozen=True):
    """Forget everything and say `Hello` again: messages were lost while the draft did not read."""


class Leave(InternalMessage, frozen=True):
    """End with status 0: nobody uses the draft."""


# -- rank 0 of the target -> the other ranks ------------------------------------------------------------------------

Slot = Annotated[int, Meta(ge=0, le=65535)]
Page = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Pages = Annotated[list[Page], Meta(max_length=2**20)]


class RowStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One row of a forward; its page table is the first `kept` pages that its slot had before, then `pages`."""

    slot: Slot
    start: Count
    token_ids: Tokens
    outputs: Count
    kept: Count
    pages: Pages


class RankStep(InternalMessage, frozen=True):
    """A forward over `rows`. `laws` has one a row to sample with; None asks for the logits."""

    rows: Annotated[list[RowStep], Meta(max_length=65536)]
    laws: Annotated[list[Law], Meta(max_length=65536)] | None


# -- child -> supervisor --------------------------------------------------------------------------------------------


class Status(InternalMessage, frozen=True):
    """The state of a child. `failed` carries the cause and the exit code that it deserves."""

    role: Name
    state: Literal["ready", "failed", "stopped"]
    message: Annotated[str, Meta(max_length=65536)] = ""
    exit_code: Annotated[int, Meta(ge=0, le=255)] = 0


class Loading(InternalMessage, frozen=True):
    done: Count
    total: Count


class DraftWanted(InternalMessage, frozen=True):
    """From a target that has told its draft to leave: start one again. Repeated until the draft joins."""


class RoundEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """An `Emission` without its tokens, as the frontend saw it at `at` (monotonic ns); `first`: the prefill's."""

    at: Count
    request: RequestId
    tokens: Count
    drafted: Count
    accepted: Count
    cache: Name
    first: bool
    source: Source | Literal[""] = ""


class EndEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A request that ended at `at` (monotonic ns); its `metrics` are empty if the target did not report the end."""

    at: Count
    request: RequestId
    prompt_tokens: Count
    completion_tokens: Count
    reason: Name
    metrics: Metrics


class FrontendReport(InternalMessage, frozen=True, tag="Report"):
    """Frontend -> supervisor while someone watches: events since the last report; `dropped` of them had no room."""

    load: Load
    open_requests: Count
    state: Name
    rounds: Annotated[list[RoundEvent], Meta(max_length=MAX_ROUNDS)]
    ended: Annotated[list[EndEvent], Meta(max_length=MAX_ENDED)]
    dropped: Count = 0


# -- supervisor -> frontend -----------------------------------------------------------------------------------------


class Drain(InternalMessage, frozen=True):
    """Finish the open requests within `seconds` and refuse new ones. Then end the rest and answer `stopped`."""

    seconds: Seconds


class TargetLost(InternalMessage, frozen=True):
    """The target has died, and its requests with it. Another one is started, unless the engine drains."""


class Watch(InternalMessage, frozen=True):
    """Someone watches: send reports for `seconds` from now on."""

    seconds: Seconds


def internal(union: Any) -> public.Direction:
    return public.Direction(INTERNAL_VERSION, msgspec.msgpack.Decoder(union))


PEER_TO_TARGET = internal(Hello | Readers | Submit | Abort)
TARGET_TO_FRONTEND = internal(Ready | Step)
Told: TypeAlias = Admit | Outcomes | Launched | Retune | Release | Rehearse | Rejoin
"""Messages of a target to a draft, on this machine or another one."""
TARGET_TO_DRAFT = internal(Ready | Told | Leave)
RANK_STEP = internal(RankStep)
CHILD_TO_SUPERVISOR = internal(Status | Loading | DraftWanted | FrontendReport)
SUPERVISOR_TO_CHILD = internal(Drain | TargetLost | Watch)
