"""The arguments and results of a client, as plain values."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import msgspec

from ssd.config.params import SamplingParams
from ssd.errors import UsageError
from ssd.ipc.public import ChatMessage, Chunk, Done, FinishReason, Generate, Metrics, TokenLogprob, Usage

Prompt: TypeAlias = str | Sequence[int]
"""Text, or token ids."""
ChatTurn: TypeAlias = ChatMessage | Mapping[str, str]
"""One message of a chat: {"role": "user", "content": "Hello"}, or the same as a `ChatMessage`."""
Conversation: TypeAlias = Sequence[ChatTurn]
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None
"""The sampling of a batch: one for all requests, or a list with one for each; None is the model's own."""


class Completion(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of one finished request.

    `text` leaves out special tokens and ends before a stop string; `token_ids` has all tokens. `logprobs` has one entry
    for each of `token_ids`, `prompt_logprobs` one for each prompt token but the first, if asked for.
    `SamplingParams.pooling` asks for the `embedding`."""

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: FinishReason
    usage: Usage
    metrics: Metrics
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    embedding: list[float] | None = None


class StreamChunk(msgspec.Struct, frozen=True):
    """The output of one round, or of several that were read late; the last chunk has only the `completion`."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    completion: Completion | None = None
    prompt_logprobs: list[TokenLogprob] | None = None


def request(name: int, prompt: Prompt | Conversation, params: SamplingParams | None, chat: bool = False) -> Generate:
    """Return the request for a text, token ids or a conversation. With `chat`, a text is what a user says.

    Raises UsageError for anything else."""
    if not isinstance(prompt, Sequence):
        kind = type(prompt).__name__
        raise UsageError(f"a prompt is a text, token ids or a conversation, not {kind}; a batch is a list of them")
    if params is not None and not isinstance(params, SamplingParams):
        raise UsageError(f"params is a SamplingParams, not {type(params).__name__}")
    if isinstance(prompt, str):
        messages = [ChatMessage("user", prompt)] if chat else None
        return Generate(name, None if chat else prompt, messages=messages, params=params)
    if is_conversation(prompt):
        return Generate(name, messages=_messages(prompt), params=params)
    return Generate(name, token_ids=list(prompt), params=params)  # type: ignore[arg-type]


def is_conversation(prompt: Sequence[Any]) -> TypeGuard[Conversation]:
    return bool(prompt) and isinstance(prompt[0], ChatMessage | Mapping)


def conversations(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    batch: Any = [messages] if not messages or is_conversation(messages) else messages
    return [_messages(turns) for turns in batch]


def _messages(turns: Conversation) -> list[ChatMessage]:
    try:
        return [turn if isinstance(turn, ChatMessage) else msgspec.convert(turn, ChatMessage) for turn in turns]
    except msgspec.ValidationError as error:
        raise UsageError(f"a message of a chat has a role and a content: {error}") from None


def completion(request: Generate, chunks: Sequence[Chunk], done: Done) -> Completion:
    params = request.params or SamplingParams()
    return Completion(
        text="".join(chunk.text for chunk in chunks) + done.text,
        token_ids=[token for chunk in chunks for token in chunk.token_ids],
        prompt_token_ids=done.prompt_token_ids,
        finish_reason=done.finish_reason,
        usage=done.usage,
        metrics=done.metrics,
        logprobs=None if params.logprobs is None else _joined(chunk.logprobs for chunk in chunks),
        prompt_logprobs=None if params.prompt_logprobs is None else _joined(chunk.prompt_logprobs for chunk in chunks),
        embedding=None if done.embedding is None else array("f", done.embedding).tolist(),
    )


def _joined(parts: Iterable[list[TokenLogprob] | None]) -> list[TokenLogprob]:
    return [entry for part in parts for entry in part or ()]
