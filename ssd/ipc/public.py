"""The public protocol: every message between a client and an engine, and its two frames (docs/protocol.md)."""

from __future__ import annotations

import struct
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec
from msgspec import Meta

from ssd.config.params import SamplingDefaults, SamplingParams, Speculation, TokenId

MAGIC = b"SSD"
PROTOCOL_VERSION = 6
_HEADER = struct.Struct("<3sBI")

MAX_PROMPT_TOKENS = 1_048_576
MAX_TEXT = 4 * 2**20
MAX_TEMPLATE_KWARGS = 64 * 2**10
MAX_TOOLS = 2**20
MAX_CALLS = 128

RequestId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
Number = Annotated[float, Meta(ge=-1e18, le=1e18)]
Milliseconds = Annotated[float, Meta(ge=0, le=1e12)]
Name = Annotated[str, Meta(max_length=512)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
PromptIds = Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)]
Tokens = Annotated[list[TokenId], Meta(max_length=65536)]
Embedding = Annotated[bytes, Meta(max_length=2**18)]
"""float32 numbers, little-endian."""
FinishReason = Literal["stop", "length", "abort", "error"]
Source = Literal["draft", "lookup", "memory", "grammar"]
"""Proposers of draft tokens: the draft model; a lookup in the request's own text, or a plugin; texts of this and
earlier requests; a grammar that allows no other token."""


class BadFrame(ValueError):
    """A frame that is no message of this protocol. The receiver drops and counts it; it is never fatal."""


class Message(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True):
    version: ClassVar[int] = PROTOCOL_VERSION


class Direction(NamedTuple):
    version: int
    decoder: msgspec.msgpack.Decoder[Any]


# -- parts of messages ----------------------------------------------------------------------------------------------


class TokenLogprob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Natural log-probability of an emitted token, and the likeliest alternatives as (id, logprob) pairs."""

    token_id: TokenId
    logprob: Number
    top: Annotated[list[tuple[TokenId, Number]], Meta(max_length=20)]


Logprobs = Annotated[list[TokenLogprob], Meta(max_length=MAX_PROMPT_TOKENS)]


class Metrics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Figures of one request. A round is one verification; times are means per round in milliseconds.

    `hit_rate` leaves out the first round after prefill and is 0 in modes `ar` and `sd`. `acceptance_histogram[a]`
    counts the rounds that accepted `a` draft tokens. `time_to_first_token_ms` includes `queue_time_ms`. `plan`, in mode
    `auto`, says which plan was in force at the end, and why."""

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
    accepted_by_source: dict[Source, Count] = {}
    queue_time_ms: Milliseconds = 0.0
    time_to_first_token_ms: Milliseconds = 0.0
    generation_time_ms: Milliseconds = 0.0
    verify_ms: Milliseconds = 0.0
    draft_wait_ms: Milliseconds = 0.0
    round_overhead_ms: Milliseconds = 0.0
    draft_step_ms: Milliseconds = 0.0
    cached_tokens: Count = 0
    plan: Name = ""


class Usage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    prompt_tokens: Count
    completion_tokens: Count


class CalledTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call in an earlier answer. `arguments` is JSON."""

    id: Name
    name: Name
    arguments: Text


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One turn. A `tool`'s content is the result of the call `tool_call_id` of the tool `name`."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text
    tool_calls: Annotated[list[CalledTool], Meta(max_length=MAX_CALLS)] = []
    tool_call_id: Name = ""
    name: Name = ""
    reasoning_content: Text = ""

    @property
    def characters(self) -> int:
        return len(self.content) + len(self.reasoning_content) + sum(len(call.arguments) for call in self.tool_calls)


class ChatOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options for the model's chat template, which makes a prompt of messages.

    With `continue_final_message` the prompt ends with the last message, which the answer continues. `template_kwargs`
    is a JSON object: more variables for the template. `tools` is a JSON array of OpenAI's tools."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Annotated[str, Meta(max_length=MAX_TEMPLATE_KWARGS)] = "{}"
    tools: Annotated[str, Meta(max_length=MAX_TOOLS)] = "[]"


# -- client -> engine -----------------------------------------------------------------------------------------------


class Generate(Message, frozen=True):
    """Ask for one completion of exactly one of `prompt`, `token_ids` and `messages`; `chat` goes with `messages`.

    `id` is unique among the client's open requests. Without `params` the engine's `Description.sampling` holds."""

    id: RequestId
    prompt: Text | None = None
    token_ids: PromptIds | None = None
    messages: Annotated[list[ChatMessage], Meta(max_length=1024)] | None = None
    params: SamplingParams | None = None
    chat: ChatOptions = ChatOptions()


class Cancel(Message, frozen=True):
    """Stop a request. It still ends with one `Done` (reason `abort`), unless it had already ended."""

    id: RequestId


class Describe(Message, frozen=True):
    """Ask for the `Description` of the served model."""


# -- engine -> client -----------------------------------------------------------------------------------------------


class Description(Message, frozen=True):
    """The served `model`, under all of `names`. `max_model_len` counts tokens of prompt and output together.

    `speculation` and `sampling` are the defaults of requests that do not give their own."""

    model: Name
    names: Annotated[list[Name], Meta(max_length=64)]
    draft: Name
    speculation: Speculation
    vocab_size: Count
    max_model_len: Count
    chat: bool
    sampling: SamplingDefaults = SamplingDefaults()


class Chunk(Message, frozen=True):
    """Tokens that one round added, or several rounds for a client that reads slowly.

    `text` may be empty while a character is incomplete. `prompt_logprobs` come with the first tokens, one for each
    prompt token but the first. An empty chunk tests whether the client is still connected."""

    id: RequestId
    text: Text
    token_ids: Tokens
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None


class Done(Message, frozen=True):
    """The end of an admitted request, sent once.

    `text` was still held back; `embedding` is for `SamplingParams.pooling`."""

    id: RequestId
    finish_reason: FinishReason
    text: Text
    prompt_token_ids: PromptIds
    usage: Usage
    metrics: Metrics
    embedding: Embedding | None = None


class Failed(Message, frozen=True):
    """The end of a request that was refused or failed, sent once. `code` is stable, `message` is for people."""

    id: RequestId
    code: Name
    message: Name


# -- frames ---------------------------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder()


def pack(message: Message, epoch: int = 0, version: int | None = None) -> list[bytes]:
    """Return a message's two frames: a header (magic, protocol version, epoch) and a MessagePack body."""
    return [_HEADER.pack(MAGIC, message.version if version is None else version, epoch), _encoder.encode(message)]


def version_of(frames: list[bytes]) -> int | None:
    """Return the protocol version in a message's header; None if the frames are not of our protocol."""
    if len(frames) != 2 or len(frames[0]) != _HEADER.size or not frames[0].startswith(MAGIC):
        return None
    return int(_HEADER.unpack(frames[0])[1])


def unpack(frames: list[bytes], direction: Direction) -> tuple[int, Any]:
    """Return (epoch, message). Raises `BadFrame`, and nothing else, for any other bytes."""
    if len(frames) != 2 or len(frames[0]) != _HEADER.size:
        raise BadFrame("expected a header frame and a body frame")
    magic, version, epoch = _HEADER.unpack(frames[0])
    if magic != MAGIC:
        raise BadFrame("not an ssd frame")
    if version != direction.version:
        raise BadFrame(f"protocol version {version}, this side speaks {direction.version}")
    try:
        return epoch, direction.decoder.decode(frames[1])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadFrame(printable(str(error))) from None


def printable(text: str, most: int = 200) -> str:
    """Return a peer's text for a log or a terminal: one line, without control characters, bounded."""
    said = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:most])
    return said if len(text) <= most else f"{said}…"


CLIENT_TO_FRONTEND = Direction(PROTOCOL_VERSION, msgspec.msgpack.Decoder(Generate | Cancel | Describe))
FRONTEND_TO_CLIENT = Direction(PROTOCOL_VERSION, msgspec.msgpack.Decoder(Description | Chunk | Done | Failed))
