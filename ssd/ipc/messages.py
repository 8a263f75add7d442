"""Every message of every socket, as bounded msgspec Structs (contract C7: no pickle; C8: bounded).

A message is two frames: a fixed header (magic, protocol version, epoch) and one msgpack body whose type is given by
its tag. The tables `CLIENT`, `ENGINE`, ... name the union that each direction of each socket accepts.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ssd.params import CacheSalt, SamplingParams, Speculation, TokenId

MAGIC = b"SSD"
PROTOCOL_VERSION = 2
_HEADER = struct.Struct("<3sBI")

HANDLE_BYTES, UUID_BYTES, MARK_BYTES = 64, 16, 16  # of memory on a GPU
MAX_PROMPT_TOKENS = 1_048_576
MAX_TEXT = 4 * 2**20

RequestId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
Number = Annotated[float, Meta(ge=-1e18, le=1e18)]
Milliseconds = Annotated[float, Meta(ge=0, le=1e12)]
Name = Annotated[str, Meta(max_length=512)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
PromptIds = Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)]
Tokens = Annotated[list[TokenId], Meta(max_length=65536)]
FinishReason = Literal["stop", "length", "abort", "error"]
DraftState = Literal["down", "up", "open", "half_open"]
"""Not there; in use; left alone by the circuit breaker (`ssd.target.breaker`); on trial."""


class BadFrame(ValueError):
    """A frame that is not a message of this protocol; it is dropped and counted, never fatal."""


class Message(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    """Base of all messages; the tag is the class name."""


# -- results that travel as part of messages ------------------------------------------------------------------------


class TokenLogprob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Log-probability (natural) of an emitted token and of the likeliest alternatives as (id, logprob) pairs."""

    token_id: TokenId
    logprob: Number
    top: Annotated[list[tuple[TokenId, Number]], Meta(max_length=20)]


Logprobs = Annotated[list[TokenLogprob], Meta(max_length=MAX_PROMPT_TOKENS)]


class Metrics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one request went. Definitions: CONVENTIONS 3; times are means per round in milliseconds.

    A round is one verification. `hit_rate` leaves the first round after prefill out and is 0 in `ar` and `sd`.
    `acceptance_histogram[a]` counts the rounds that accepted `a` draft tokens. The time in the queue is part of that to
    the first token.
    """

    mode: Name = "ar"
    rounds: Count = 0
    drafted_tokens: Count = 0
    accepted_tokens: Count = 0
    hits: Count = 0
    misses: Count = 0
    mean_acceptance_length: Number = 0.0
    mean_acceptance_length_on_hit: Number = 0.0
    mean_acceptance_length_on_miss: Number = 0.0
    hit_rate: Number = 0.0
    tokens_per_second: Number = 0.0
    acceptance_histogram: Annotated[list[Count], Meta(max_length=65)] = []
    queue_time_ms: Milliseconds = 0.0
    time_to_first_token_ms: Milliseconds = 0.0
    generation_time_ms: Milliseconds = 0.0
    verify_ms: Milliseconds = 0.0
    draft_wait_ms: Milliseconds = 0.0
    round_overhead_ms: Milliseconds = 0.0
    draft_step_ms: Milliseconds = 0.0
    cached_tokens: Count = 0


class Usage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompt_tokens: Count
    completion_tokens: Count


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: Text


# -- client <-> frontend (the public protocol) ----------------------------------------------------------------------


class Generate(Message, frozen=True):
    """Ask for one completion. Exactly one of `prompt`, `token_ids` and `messages` is given.

    `id` is the client's own name for the request, unique among its open ones.
    """

    id: RequestId
    prompt: Text | None = None
    token_ids: PromptIds | None = None
    messages: Annotated[list[ChatMessage], Meta(max_length=1024)] | None = None
    params: SamplingParams = SamplingParams()


class Cancel(Message, frozen=True):
    """Stop a request; it still ends with one `Done` (reason `abort`) unless it had already ended."""

    id: RequestId


class Describe(Message, frozen=True):
    """Ask what is served; answered by `Description`."""


class Description(Message, frozen=True):
    """What is served: `model` under all of `names`, up to `max_model_len` tokens of prompt and output together."""

    model: Name
    names: Annotated[list[Name], Meta(max_length=64)]
    draft: Name
    speculation: Speculation
    vocab_size: Count
    max_model_len: Count
    chat: bool


class Chunk(Message, frozen=True):
    """Tokens that one round added, or several rounds for a client that reads slowly. `text` may be empty while a
    character is incomplete. `prompt_logprobs` come with the first tokens, for all of the prompt's but its first. With
    neither tokens nor text it says nothing: sending it tells an engine whether the client is still there."""

    id: RequestId
    text: Text
    token_ids: Tokens
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None


class Done(Message, frozen=True):
    """The one end of a request that was accepted. `text` is what was still held back."""

    id: RequestId
    finish_reason: FinishReason
    text: Text
    prompt_token_ids: PromptIds
    usage: Usage
    metrics: Metrics


class Failed(Message, frozen=True):
    """The one end of a request that was refused or broke. `code` is stable, `message` is for people."""

    id: RequestId
    code: Name
    message: Name


# -- frontend <-> target --------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of a peer to the target: who it is and which model it believes in. A draft that cannot open what
    the target exports says it again, with `imports` false; from then on both use the memory of the host."""

    role: Literal["frontend", "draft"]
    vocab_size: Count
    digest: Name
    imports: bool = True


class ArenaHandle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`size` bytes on a GPU that the target exports as `name`: CUDA's handle of the `memory`, the UUID of the `gpu` it
    lies on, and the `mark` that follows it there (`ssd.ipc.shared`)."""

    name: Name
    size: Count
    memory: Annotated[bytes, Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
    gpu: Annotated[bytes, Meta(min_length=UUID_BYTES, max_length=UUID_BYTES)]
    mark: Annotated[bytes, Meta(min_length=MARK_BYTES, max_length=MARK_BYTES)]


class Ready(Message, frozen=True):
    """The target's answer to a `Hello` it accepts. A draft finds its `arenas` there, those that are not in memory that
    both have inherited."""

    arenas: Annotated[list[ArenaHandle], Meta(max_length=8)] = []


class Refused(Message, frozen=True):
    """The target's answer to a `Hello` of another vocabulary or model."""

    message: Name


class Submit(Message, frozen=True):
    """A tokenised request. `params.seed` and `params.speculation` are filled in."""

    request: RequestId
    token_ids: PromptIds
    params: SamplingParams


class Abort(Message, frozen=True):
    """Forget a request. No `Emission` follows an abort that the target has read."""

    request: RequestId


class Emission(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one step gave one request; `finish_reason` ends it, `error` says why when the reason is `error`.

    `drafted` tokens were verified and `accepted` of them were right. `cache` says what the speculation cache had for
    the round: "hit", the reason of a miss (CONVENTIONS 3), or nothing where that question does not arise.
    """

    request: RequestId
    token_ids: Tokens
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    metrics: Metrics | None = None
    error: Name = ""
    drafted: Count = 0
    accepted: Count = 0
    cache: Name = ""
    prompt_logprobs: Logprobs | None = None


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """How busy the target is: requests that run and that wait, the part of the KV cache in use (0 to 1), what the draft
    is, the tokens of the step, and the seconds of its forward pass and of waiting for the draft before it. Counted so
    far: how often what the draft had was not sound, tree steps of the draft, the seconds in them, and look-ups that
    found nothing but what answers another outcome."""

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


class Step(Message, frozen=True):
    """All emissions of one step: one message per round (CONVENTIONS 3)."""

    emissions: Annotated[list[Emission], Meta(max_length=4096)]
    load: Load = Load()


# -- target -> draft ------------------------------------------------------------------------------------------------


class Admit(Message, frozen=True):
    """Begin or rebuild a sequence (contract C1). `token_ids` are committed; `round` is the verification in flight,
    which carries no draft tokens."""

    request: RequestId
    slot: Count
    round: Count
    token_ids: PromptIds
    temperature: Number
    top_k: Count
    top_p: Number
    min_p: Number
    seed: RequestId
    speculation: Speculation
    cache_salt: CacheSalt = ""


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Verification `round` of `request` accepted `accepted` draft tokens and emitted `token` after them.

    `in_flight` is how many tokens of the chain cached for this outcome are being verified now, or -1 when the target
    has not decided (it waits for a backup; a `Launched` follows).
    """

    request: RequestId
    round: Count
    accepted: Count
    token: TokenId
    in_flight: Annotated[int, Meta(ge=-1, le=64)]


class Outcomes(Message, frozen=True):
    """The outcomes of one step, one message for the batch."""

    rows: Annotated[list[Outcome], Meta(max_length=4096)]


class Launch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Verification `round` of `request` has `in_flight` draft tokens: the draft's first ones, or the `tokens` that the
    target has from elsewhere."""

    request: RequestId
    round: Count
    in_flight: Annotated[int, Meta(ge=0, le=64)]
    tokens: Annotated[list[TokenId], Meta(max_length=64)] = []


class Launched(Message, frozen=True):
    """The rows left open by `Outcomes` are being verified now."""

    rows: Annotated[list[Launch], Meta(max_length=4096)]


class Retune(Message, frozen=True):
    """(request, how to speculate from now on): K and fan-outs as the tuner has chosen them."""

    rows: Annotated[list[tuple[RequestId, Speculation]], Meta(max_length=4096)]


class Release(Message, frozen=True):
    """Sequences that ended, lost their pages or go on without a draft."""

    requests: Annotated[list[RequestId], Meta(max_length=4096)]


class Rejoin(Message, frozen=True):
    """Forget everything and say `Hello` again: messages were lost while the draft did not read."""


def pack(message: Message, epoch: int = 0) -> list[bytes]:
    """The two frames of a message."""
    return [_HEADER.pack(MAGIC, PROTOCOL_VERSION, epoch), _encoder.encode(message)]


def unpack(frames: list[bytes], decoder: msgspec.msgpack.Decoder[Any]) -> tuple[int, Any]:
    """(epoch, message) of two frames; raises `BadFrame` and nothing else for whatever may arrive."""
    if len(frames) != 2 or len(frames[0]) != _HEADER.size:
        raise BadFrame("expected a header frame and a body frame")
    magic, version, epoch = _HEADER.unpack(frames[0])
    if magic != MAGIC:
        raise BadFrame("not an ssd frame")
    if version != PROTOCOL_VERSION:
        raise BadFrame(f"protocol version {version}, this side speaks {PROTOCOL_VERSION}")
    try:
        return epoch, decoder.decode(frames[1])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadFrame(str(error)) from None


_encoder = msgspec.msgpack.Encoder()

CLIENT_TO_FRONTEND = msgspec.msgpack.Decoder(Generate | Cancel | Describe)
FRONTEND_TO_CLIENT = msgspec.msgpack.Decoder(Description | Chunk | Done | Failed)
PEER_TO_TARGET = msgspec.msgpack.Decoder(Hello | Submit | Abort)
TARGET_TO_FRONTEND = msgspec.msgpack.Decoder(Ready | Refused | Step)
TARGET_TO_DRAFT = msgspec.msgpack.Decoder(Ready | Refused | Admit | Outcomes | Launched | Retune | Release | Rejoin)
