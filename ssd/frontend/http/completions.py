"""`/v1/completions`: its requests to the engine, its JSON, and prompts to fill in. A wrong field raises HttpError."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from ssd.config.engine import EngineConfig
from ssd.frontend.detokenization import Vocabulary, text_of
from ssd.frontend.fill_in import File
from ssd.frontend.http import answers
from ssd.frontend.http.bodies import CompletionRequest, Sampling
from ssd.frontend.http.errors import invalid
from ssd.frontend.http.exchange import Exchange
from ssd.frontend.http.generation import Generation
from ssd.frontend.http.parameters import count, each_choice, most_tokens, sampling
from ssd.frontend.http.service import Service
from ssd.frontend.http.structured import AnswerForm
from ssd.frontend.http.style import Choice, Each, Style
from ssd.frontend.text_jobs import Encoded, Fill
from ssd.ipc.public import Chunk, Done, Generate, TokenLogprob, Usage

_DEFAULT_TOKENS = 16


def generates(body: CompletionRequest, config: EngineConfig, form: AnswerForm) -> list[Generate]:
    """Return a request to the engine for each choice: all of the first prompt, then of the next."""
    given = prompts(body.prompt, config.server.limits.max_prompts)
    n = count(body, config)
    tokens = most_tokens(config, _DEFAULT_TOKENS, max_tokens=body.max_tokens, n_predict=body.n_predict)
    if tokens == 0 and not body.echo:
        raise invalid("max_tokens", "max_tokens must be at least 1 unless echo is set")
    if body.echo and body.logprobs is not None and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "echo with logprobs scores the prompt already; leave prompt_logprobs out")
    if body.echo and body.stream:
        raise invalid("echo", "echo cannot be streamed")
    params = sampling(
        body,
        config,
        structured=form.structured,
        max_tokens=max(1, tokens),
        logprobs=body.logprobs,
        **({"prompt_logprobs": body.logprobs} if body.echo and body.logprobs is not None else {}),
    )
    choices = each_choice(params, n)
    return [
        Generate(
            index * n + choice,
            prompt if isinstance(prompt, str) else None,
            None if isinstance(prompt, str) else prompt,
            params=own,
        )
        for index, prompt in enumerate(given)
        for choice, own in enumerate(choices)
    ]


class CompletionStyle(Style):
    prompt = "prompt"

    def __init__(self, body: CompletionRequest, name: str, vocabulary: Vocabulary) -> None:
        super().__init__(body, name, vocabulary)
        self._echo, self._tops = bool(body.echo), body.logprobs
        self._most = body.n_predict if body.max_tokens is None else body.max_tokens

    async def whole(self, choices: Sequence[Choice], each: Each) -> answers.Completion:
        if self._most == 0:
            for choice in choices:
                take_back(choice)
        return self._part(
            [await self._choice(choice, each) for choice in choices],
            usage=self._usage(choices),
            metrics=self._metrics(choices),
        )

    def events(self, choice: Choice, message: Chunk | Done) -> list[answers.Completion]:
        if isinstance(message, Done):
            shown = answers.CompletionChoice(choice.index, message.text, None, message.finish_reason)
        else:
            logprobs = None
            if self._tops is not None and message.logprobs:
                tops: Any = [self._top(entry) for entry in message.logprobs] if self._tops else None
                logprobs, choice.told = self._logprobs(message.logprobs, choice.told, tops)
            ids = message.token_ids if self._with_ids else UNSET
            shown = answers.CompletionChoice(choice.index, message.text, logprobs, None, ids)
        return [self._part([shown], usage=self._event_usage(choice))]

    def _part(self, choices: list[answers.CompletionChoice], **more: object) -> answers.Completion:
        return answers.Completion(object="text_completion", choices=choices, **self._named, **more)  # type: ignore[arg-type]

    async def _choice(self, choice: Choice, each: Each) -> answers.CompletionChoice:
        text, prompt, entries, unknown = "".join(choice.text), choice.request.prompt.tolist(), choice.logprobs, 0
        if self._echo:
            asked = choice.asked.prompt if choice.request.params.truncate_prompt_tokens is None else None
            text = (text_of(prompt, self._vocabulary) if asked is None else asked) + text
            first = [TokenLogprob(token, 0.0, []) for token in prompt[:1]]
            entries, unknown = [*first, *choice.prompt_logprobs, *entries], len(first)
        logprobs = None
        if self._tops is not None:
            logprobs, _ = self._logprobs(entries, 0, await each(self._top, entries) if self._tops else None)
            logprobs.token_logprobs[:unknown] = [None] * unknown
            if logprobs.top_logprobs is not None:
                logprobs.top_logprobs[:unknown] = [None] * unknown
        return answers.CompletionChoice(
            choice.index,
            text,
            logprobs,
            choice.end.finish_reason,
            choice.token_ids if self._with_ids else UNSET,
            prompt if self._with_ids else UNSET,
            await self._prompt_logprobs(choice, each),
        )

    def _logprobs(
        self, entries: Sequence[TokenLogprob], offset: int, tops: list[dict[str, float] | None] | None
    ) -> tuple[answers.CompletionLogprobs, int]:
        pieces = [self._vocabulary.piece(entry.token_id) for entry in entries]
        *offsets, end = accumulate(map(len, pieces), initial=offset)
        return answers.CompletionLogprobs(pieces, [entry.logprob for entry in entries], tops, offsets), end

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        return {
            self._vocabulary.piece(token): logprob for token, logprob in [*entry.top, (entry.token_id, entry.logprob)]
        }


def take_back(choice: Choice) -> None:
    """Drop the one token that the engine made though none was asked for: it makes no fewer."""
    for made in (choice.text, choice.token_ids, choice.logprobs):
        made.clear()
    end = choice.end
    reason = "length" if end.finish_reason == "stop" else end.finish_reason
    choice.done = replace(end, finish_reason=reason, usage=Usage(end.usage.prompt_tokens, 0))


def prompts(given: str | Sequence[str | int | list[int]], most: int, field: str = "prompt") -> list[str | list[int]]:
    """Return the prompts in a `field` of a body, as texts or lists of token ids: at most `most`."""
    if isinstance(given, str):
        return [given]
    if given and all(isinstance(entry, int) for entry in given):
        return [given]  # type: ignore[list-item]  # one prompt of token ids
    if not given or not (all(isinstance(e, str) for e in given) or all(isinstance(e, list) for e in given)):
        raise invalid(field, f"{field} must be a text, token ids, or a list of texts or of lists of token ids")
    if len(given) > most:
        raise invalid(field, f"{len(given)} prompts in a request; at most {most} are accepted")
    return given  # type: ignore[return-value]


# -- filling in the middle -------------------------------------------------------------------------------------------


async def complete(service: Service, exchange: Exchange, body: CompletionRequest, style: Style) -> None:
    if body.suffix:
        await _fill(service, exchange, body)
        style.shown = service.manager.texts.vocabulary.fill_in_ends  # stop tokens are hidden, special or not
    requests = generates(body, service.manager.config, style.form)
    await Generation(service.manager, exchange, style, requests, service.turns).run(bool(body.stream))


async def _fill(service: Service, exchange: Exchange, body: CompletionRequest) -> None:
    given = prompts(body.prompt, service.manager.config.server.limits.max_prompts)
    if body.echo:
        raise invalid("echo", "echo is of a prompt alone; leave suffix out")
    filled: list[str | int | list[int]] = []
    for prompt in given:
        if not isinstance(prompt, str):
            raise invalid("suffix", "suffix: the prompt before it must be a text, too")
        filled.append(await fill_in_prompt(service, exchange, body, "suffix", (prompt, body.suffix or "")))
    body.prompt = filled


async def fill_in_prompt(
    service: Service,
    exchange: Exchange,
    body: Sampling,
    blamed: str,
    around: tuple[str, str],
    files: Sequence[File] = (),
    room: int | None = None,
) -> list[int]:
    """Return the ids of the prompt for the text between two others; `body` then stops at the tokens that end it.

    With `room` for an answer, the prompt is cut to leave it. Raises HttpError, which blames the field `blamed`."""
    service.check_ready()
    config, texts = service.manager.config, service.manager.texts
    if not texts.vocabulary.fill_in_ends:
        cause = "this model's tokenizer has no tokens to fill in the middle, such as <|fim_prefix|>"
        raise invalid(blamed, f"{blamed} is not supported: {cause}", "unsupported_parameter")
    if body.truncate_prompt_tokens is not None:
        cause = "truncate_prompt_tokens would cut off the token that a prompt to fill in begins with"
        raise invalid("truncate_prompt_tokens", cause)
    body.stop_token_ids = sorted({*(body.stop_token_ids or ()), *texts.vocabulary.fill_in_ends})
    most = config.max_model_len - 1
    job = Fill(*around, [*files], most if room is None else most - room, room is not None)
    found: Encoded = await service.look_up(exchange, job, "prompt")
    if found.count > job.most:
        cause = f"the prompt has {found.count} tokens with its suffix; the context of {config.max_model_len} tokens"
        raise invalid("prompt", f"{cause} must hold it and at least one more", "context_length_exceeded")
    return array("I", found.ids).tolist()
