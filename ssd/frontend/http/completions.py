"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET

from ssd.config import EngineConfig
from ssd.frontend.http import answers
from ssd.frontend.http.bodies import CompletionRequest
from ssd.frontend.http.errors import invalid
from ssd.frontend.http.generation import Choice, now
from ssd.frontend.http.parameters import count, each_choice, sampling
from ssd.frontend.tokenization import Tokenizer
from ssd.ipc.messages import Chunk, Done, Generate, TokenLogprob

_DEFAULT_TOKENS = 16


def generates(body: CompletionRequest, config: EngineConfig) -> list[Generate]:
    """One request to the engine for each choice: all of the first prompt, then all of the next. Raises HttpError."""
    prompts = _prompts(body, config.server.limits.max_prompts)
    n = count(body, config)
    tokens = _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    if tokens == 0 and not body.echo:
        raise invalid("max_tokens", "max_tokens must be at least 1 unless echo is set")
    if body.echo and body.stream:
        raise invalid("echo", "echo cannot be streamed")
    params = sampling(
        body,
        config,
        max_tokens=max(1, tokens),
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    seeded = each_choice(params, n)
    return [
        Generate(
            index * n + choice,
            prompt if isinstance(prompt, str) else None,
            None if isinstance(prompt, str) else prompt,
            params=own,
        )
        for index, prompt in enumerate(prompts)
        for choice, own in enumerate(seeded)
    ]


class CompletionStyle:
    """See `generation.Style`."""

    def __init__(self, body: CompletionRequest, name: str, tokenizer: Tokenizer) -> None:
        self._body, self._tokenizer = body, tokenizer
        self._named: dict[str, Any] = {"id": name, "object": "text_completion", "created": now(), "model": body.model}
        self._usage = bool(body.stream_options and body.stream_options.include_usage)

    def whole(self, choices: Sequence[Choice], usage: answers.Usage) -> answers.Completion:
        return self._object(
            [self._choice(choice) for choice in choices],
            usage=usage,
            metrics=choices[0].metrics if self._body.return_metrics else UNSET,
        )

    def first(self, choice: Choice) -> None:
        return None

    def event(self, choice: Choice, message: Chunk | Done) -> answers.Completion:
        if isinstance(message, Done):
            shown = answers.CompletionChoice(choice.index, message.text, None, message.finish_reason)
        else:
            logprobs = None
            if self._body.logprobs is not None and message.logprobs:
                logprobs, choice.told = self._logprobs(message.logprobs, choice.told)
            ids = message.token_ids if self._body.return_token_ids else UNSET
            shown = answers.CompletionChoice(choice.index, message.text, logprobs, None, ids)
        return self._object([shown], usage=None if self._usage else UNSET)

    def last(self, choices: Sequence[Choice], usage: answers.Usage) -> answers.Completion | None:
        if not self._usage and not self._body.return_metrics:
            return None
        return self._object(
            [],
            usage=usage if self._usage else UNSET,
            metrics=choices[0].metrics if self._body.return_metrics else UNSET,
        )

    def _object(self, choices: list[answers.CompletionChoice], **more: Any) -> answers.Completion:
        return answers.Completion(choices=choices, **self._named, **more)

    def _choice(self, choice: Choice) -> answers.CompletionChoice:
        assert choice.done is not None
        text, ids, entries = "".join(choice.text), choice.token_ids, choice.logprobs
        if self._body.max_tokens == 0:  # the engine has made one token, since it makes no fewer
            text, ids, entries = "", [], []
        prompt = choice.request.prompt
        logprobs = None
        if self._body.echo:
            text = self._tokenizer.decode(prompt) + text
        if self._body.logprobs is not None:
            head = [TokenLogprob(prompt[0], 0.0, []), *choice.prompt_logprobs] if self._body.echo else []
            logprobs, _ = self._logprobs([*head, *entries], 0)
            if self._body.echo:
                logprobs.token_logprobs[0] = None
                if logprobs.top_logprobs is not None:
                    logprobs.top_logprobs[0] = None
        asked = bool(self._body.return_token_ids)
        return answers.CompletionChoice(
            choice.index, text, logprobs, choice.done.finish_reason, ids if asked else UNSET, prompt if asked else UNSET
        )

    def _logprobs(self, entries: Sequence[TokenLogprob], offset: int) -> tuple[answers.CompletionLogprobs, int]:
        """Of tokens whose text begins at `offset`, and where the text after them begins."""
        pieces = [self._tokenizer.piece(entry.token_id) for entry in entries]
        offsets = []
        for piece in pieces:
            offsets.append(offset)
            offset += len(piece)
        tops: list[dict[str, float] | None] | None = None
        if self._body.logprobs:
            tops = [
                {
                    self._tokenizer.piece(token): logprob
                    for token, logprob in [*entry.top, (entry.token_id, entry.logprob)]
                }
                for entry in entries
            ]
        return answers.CompletionLogprobs(pieces, [entry.logprob for entry in entries], tops, offsets), offset


def _prompts(body: CompletionRequest, most: int) -> list[str | list[int]]:
    """The prompts of a request: texts, or lists of token ids. Raises HttpError."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if given and all(isinstance(entry, int) for entry in given):
        return [given]  # type: ignore[list-item]  # one prompt of token ids
    if not given or not (all(isinstance(e, str) for e in given) or all(isinstance(e, list) for e in given)):
        raise invalid("prompt", "prompt must be a text, token ids, or a list of texts or of lists of token ids")
    if len(given) > most:
        raise invalid("prompt", f"{len(given)} prompts in a request; at most {most} are accepted")
    return given  # type: ignore[return-value]
