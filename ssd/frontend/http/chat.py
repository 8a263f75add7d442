"""`/v1/chat/completions`: its requests to the engine, and its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, Raw

from ssd.config.engine import EngineConfig
from ssd.frontend.detokenization import Vocabulary
from ssd.frontend.http import answers
from ssd.frontend.http.bodies import ChatRequest, Said
from ssd.frontend.http.errors import invalid
from ssd.frontend.http.exchange import encoder
from ssd.frontend.http.parameters import count, each_choice, sampling
from ssd.frontend.http.style import Choice, Each, Style
from ssd.ipc.public import ChatMessage, Chunk, Done, FinishReason, Generate, TokenLogprob


def conversation(messages: Sequence[Said]) -> list[ChatMessage]:
    """Converts messages to those of the engine, with one text each. `developer` is the newer name of `system`."""
    return [
        ChatMessage(
            "system" if said.role == "developer" else said.role,
            said.content if isinstance(said.content, str) else "".join(part.text for part in said.content),
        )
        for said in messages
    ]


def generates(body: ChatRequest, config: EngineConfig) -> list[Generate]:
    """Returns one request to the engine for each choice. Raises HttpError."""
    n = count(body, config)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = sampling(
        body,
        config,
        max_tokens=config.max_model_len if limit is None else limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    messages = conversation(body.messages)
    return [Generate(index, messages=messages, params=own) for index, own in enumerate(each_choice(params, n))]


class ChatStyle(Style):
    """Choices as messages of an assistant."""

    prompt = "messages"

    def __init__(self, body: ChatRequest, name: str, vocabulary: Vocabulary) -> None:
        super().__init__(body, name, vocabulary)
        self._with_logprobs = bool(body.logprobs)

    async def whole(self, choices: Sequence[Choice], each: Each) -> answers.Chat:
        return answers.Chat(
            object="chat.completion",
            choices=[await self._choice(choice, each) for choice in choices],
            usage=self._usage(choices),
            metrics=self._metrics(choices),
            **self._named,
        )

    def first(self, choice: Choice) -> answers.ChatChunk:
        return self._chunk(choice, answers.Delta("assistant", ""))

    def event(self, choice: Choice, message: Chunk | Done) -> answers.ChatChunk:
        if isinstance(message, Done):
            delta = answers.Delta(content=message.text) if message.text else answers.Delta()
            return self._chunk(choice, delta, reason=message.finish_reason)
        ids = message.token_ids if self._with_ids else UNSET
        return self._chunk(choice, answers.Delta(content=message.text), message.logprobs, token_ids=ids)

    async def _choice(self, choice: Choice, each: Each) -> answers.ChatChoice:
        logprobs = await each(self._encoded, choice.logprobs) if self._with_logprobs else None
        return answers.ChatChoice(
            choice.index,
            answers.AssistantMessage("assistant", "".join(choice.text)),
            None if logprobs is None else answers.ChatLogprobs(logprobs),
            choice.end.finish_reason,
            choice.token_ids if self._with_ids else UNSET,
            choice.request.prompt.tolist() if self._with_ids else UNSET,
        )

    def _chunk(
        self,
        choice: Choice,
        delta: answers.Delta,
        logprobs: list[TokenLogprob] | None = None,
        reason: FinishReason | None = None,
        **more: Any,
    ) -> answers.ChatChunk:
        shown = None
        if logprobs is not None:
            shown = answers.ChatLogprobs([self._content_logprob(entry) for entry in logprobs])
        return self._part(
            [answers.ChatChunkChoice(choice.index, delta, shown, reason, **more)],
            usage=None if self._with_usage else UNSET,
        )

    def _part(self, choices: list[answers.ChatChunkChoice], **more: Any) -> answers.ChatChunk:
        return answers.ChatChunk(object="chat.completion.chunk", choices=choices, **self._named, **more)

    def _encoded(self, entry: TokenLogprob) -> Any:
        """Returns one entry as JSON."""
        return Raw(encoder.encode(self._content_logprob(entry)))

    def _content_logprob(self, entry: TokenLogprob) -> answers.ContentLogprob:
        piece, raw = self._vocabulary.piece, self._vocabulary.piece_bytes
        tops = [answers.TopLogprob(piece(token), value, list(raw(token))) for token, value in entry.top]
        return answers.ContentLogprob(piece(entry.token_id), entry.logprob, list(raw(entry.token_id)), tops)
