"""What goes into a client and what comes out of it, as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec

from ssd.ipc.messages import ChatMessage, Chunk, Done, FinishReason, Generate, Metrics, TokenLogprob, Usage
from ssd.params import SamplingParams

Prompt: TypeAlias = str | Sequence[int]
"""Text, or token ids."""


class Completion(msgspec.Struct, frozen=True, omit_defaults=True):
    """One finished request. `text` leaves special tokens out and ends before a stop string; `token_ids` has all.

    `logprobs` has one entry for each of `token_ids`, `prompt_logprobs` one for each token of the prompt but the first;
    both None unless asked for.
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    metrics: Metrics
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None


class StreamChunk(msgspec.Struct, frozen=True):
    """What a stream yields: what one round added, or several rounds when they were read late.

    The first one carries the `prompt_logprobs`, if asked for. The last one adds no tokens and carries the `completion`.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    completion: Completion | None = None
    prompt_logprobs: list[TokenLogprob] | None = None


def request(name: int, prompt: Prompt, params: SamplingParams, chat: bool) -> Generate:
    """The request for one prompt of a batch; with `chat`, a text is what a user says."""
    if not isinstance(prompt, str):
        return Generate(name, token_ids=list(prompt), params=params)
    if chat:
        return Generate(name, messages=[ChatMessage("user", prompt)], params=params)
    return Generate(name, prompt, params=params)


def stream_chunk(chunk: Chunk) -> StreamChunk:
    return StreamChunk(chunk.text, chunk.token_ids, chunk.logprobs, None, chunk.prompt_logprobs)


def completion(request: Generate, chunks: Sequence[Chunk], done: Done) -> Completion:
    """All answers to `request` as one."""
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
