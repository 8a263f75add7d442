"""The JSON that HTTP clients get, by the names of the OpenAI API and of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from ssd.frontend.output_collector import Origin
from ssd.ipc.public import Done, FinishReason, Metrics, Source


class PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct):
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct):
    """Token counts.

    The last one has details, where `*_prediction_tokens` count what the draft proposed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | UnsetType = UNSET
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class SpeculativeMetrics(msgspec.Struct):
    """The figures of a choice's speculation, as docs/serving.md defines them.

    A step is one verification; times are means per step."""

    mode: str
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    accepted_by_source: dict[Source, int]
    num_cache_hits: int
    num_cache_misses: int
    mean_acceptance_length_on_hit: float
    mean_acceptance_length_on_miss: float
    draft_wait_ms: float


class RequestMetrics(msgspec.Struct):
    """The figures of one choice, on request."""

    time_to_first_token_ms: float
    generation_time_ms: float
    queue_time_ms: float
    mean_itl_ms: float
    tokens_per_second: float
    speculative_decoding: SpeculativeMetrics


class PromptLogprob(msgspec.Struct):
    """`rank` is 1 for the likeliest token; null where it is below the alternatives asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt: that token and its alternatives, by their ids. The first token has none."""


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities of each token; the first token of an echoed prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct):
    """An answer of `/v1/completions`, or an event of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: RequestMetrics | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ContentLogprob]
    refusal: None = None


class Called(msgspec.Struct):
    name: str
    arguments: str


class MessageCall(msgspec.Struct):
    """A call of a tool, whose arguments are the text of a JSON object."""

    id: str
    function: Called
    type: Literal["function"] = "function"


class DeltaCall(MessageCall):
    """A call in a stream: complete, in one event."""

    index: int = 0


class AssistantMessage(msgspec.Struct):
    """`content` is null where there are only calls, or thoughts."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[MessageCall] | UnsetType = UNSET
    function_call: Called | UnsetType = UNSET


ChatFinishReason: TypeAlias = FinishReason | Literal["tool_calls", "function_call"]


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Chat(msgspec.Struct):
    """An answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: RequestMetrics | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Delta(msgspec.Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[DeltaCall] | UnsetType = UNSET
    function_call: Called | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    token_ids: list[int] | UnsetType = UNSET
    origin: Origin | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    """One event of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: RequestMetrics | UnsetType = UNSET


class Model(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class Models(msgspec.Struct):
    object: Literal["list"]
    data: list[Model]


class Tokenized(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(msgspec.Struct):
    prompt: str


class Version(msgspec.Struct):
    version: str


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class Error(msgspec.Struct):
    error: ErrorDetail


class BareError(msgspec.Struct):
    """The body of an error that is its message alone."""

    error: str


def usage(ends: Sequence[Done], n: int) -> Usage:
    """Sum up the choices of one request, `n` of each prompt in turn; a prompt counts once.

    Its cached tokens are its first choice's: the others find the pages that this one filled."""
    firsts = ends[::n]
    prompts = sum(end.usage.prompt_tokens for end in firsts)
    completions = sum(end.usage.completion_tokens for end in ends)
    drafted = sum(end.metrics.drafted_tokens for end in ends)
    accepted = sum(end.metrics.accepted_tokens for end in ends)
    return Usage(
        prompts,
        completions,
        prompts + completions,
        PromptDetails(sum(end.metrics.cached_tokens for end in firsts)),
        CompletionDetails(accepted, drafted - accepted),
    )


def request_metrics(m: Metrics, tokens: int) -> RequestMetrics:
    return RequestMetrics(
        time_to_first_token_ms=m.time_to_first_token_ms,
        generation_time_ms=m.generation_time_ms,
        queue_time_ms=m.queue_time_ms,
        mean_itl_ms=m.generation_time_ms / (tokens - 1) if tokens > 1 else 0.0,
        tokens_per_second=m.tokens_per_second,
        speculative_decoding=SpeculativeMetrics(
            mode=m.mode,
            mean_acceptance_length=m.mean_acceptance_length,
            draft_acceptance_rate=m.accepted_tokens / m.drafted_tokens if m.drafted_tokens else 0.0,
            acceptance_histogram=m.acceptance_histogram,
            num_spec_steps=m.rounds,
            num_draft_tokens=m.drafted_tokens,
            num_accepted_draft_tokens=m.accepted_tokens,
            accepted_by_source=m.accepted_by_source,
            num_cache_hits=m.hits,
            num_cache_misses=m.misses,
            mean_acceptance_length_on_hit=m.mean_acceptance_length_on_hit,
            mean_acceptance_length_on_miss=m.mean_acceptance_length_on_miss,
            draft_wait_ms=m.draft_wait_ms,
        ),
    )
