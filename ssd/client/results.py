"""What goes into a client and comes out of it, as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

from ssd.config.params import SamplingParams
from ssd.ipc.public import ChatMessage, Chunk, Done, FinishReason, Generate, Metrics, TokenLogprob, Usage

Prompt: TypeAlias = str | Sequence[int]
"""Text, or token ids."""


class Completion(msgspec.Struct, frozen=True, omit_defaults=True):
    """One finished request.

    `text` leaves out special tokens and ends before a stop string; `token_ids` has all.

    `logprobs` has one entry for each of `token_ids`, `prompt_logprobs` one for each prompt token but the first. Both
    are None unless asked for."""

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    metrics: Metrics
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None


class StreamChunk(msgspec.Struct, frozen=True):
    """What a stream yields: the output of one round, or of several that were read late.
    The first chunk carries `prompt_logprobs`, if asked for. The last one has no tokens and carries the `completion`."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    completion: Completion | None = None
    prompt_logprobs: list[TokenLogprob] | None = None


def request(name: int, prompt: Prompt | list[ChatMessage], params: SamplingParams, chat: bool) -> Generate:
    """Returns the request for one prompt of a batch, or for a conversation. With `chat`, a text is what a user says."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], ChatMessage):
        return Generate(name, messages=prompt, params=params)
    if not isinstance(prompt, str):
        return Generate(name, token_ids=list(prompt), params=params)  # type: ignore[arg-type]
    if chat:
        return Generate(name, messages=[ChatMessage("user", prompt)], params=params)
    return Generate(name, prompt, params=params)


def stream_chunk(chunk: Chunk) -> StreamChunk:
    return StreamChunk(chunk.text, chunk.token_ids, chunk.logprobs, None, chunk.prompt_logprobs)


def completion(request: Generate, chunks: Sequence[Chunk], done: Done) -> Completion:
    """Joins all answers to `request`."""
    params = request.params
    return Completion(
        text="".join(chunk.text for chunk in chunks) + done.text,
        token_ids=[token for chunk in chunks for token in chunk.token_ids],
        prompt_token_ids=done.prompt_token_ids,
        finish_reason=done.finish_reason,
        usage=done.usage,
        metrics=done.metrics,
        logprobs=None if params.logprobs is None else _joined(chunk.logprobs for chunk in chunks),
        prompt_logprobs=None if params.prompt_logprobs is None else _joined(chunk.prompt_logprobs for chunk in chunks),
    )


def _joined(parts: Iterable[list[TokenLogprob] | None]) -> list[TokenLogprob]:
    return [entry for part in parts for entry in part or ()]
