"""Filling in the middle: `suffix` of `/v1/completions`, and llama.cpp's `/infill`, which editors ask.

Functions raise HttpError for a field that is wrong."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta

from ssd.frontend.detokenization import Vocabulary
from ssd.frontend.fill_in import File
from ssd.frontend.http import answers, bodies
from ssd.frontend.http.bodies import Anything, Sampling, Text, ignored
from ssd.frontend.http.completions import generates, prompts, take_back
from ssd.frontend.http.errors import invalid
from ssd.frontend.http.exchange import Exchange
from ssd.frontend.http.generation import Generation
from ssd.frontend.http.openapi import Route
from ssd.frontend.http.parameters import sampling
from ssd.frontend.http.service import Service
from ssd.frontend.http.style import Choice, Each, Style
from ssd.frontend.text_jobs import Encoded, Fill
from ssd.ipc.public import Chunk, Done, Generate

_NO_TIME = ignored("an answer ends by its tokens, not by a time")


class ExtraFile(msgspec.Struct, forbid_unknown_fields=True):
    """A part of another file that the model may look at."""

    text: Text
    filename: Annotated[str, Meta(max_length=4096)] = ""
    time: Annotated[Anything, ignored("files come in their order")] = UNSET
    key: Annotated[Anything, ignored("the text has it")] = msgspec.field(default=UNSET, name="str")


class InfillRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    """`/infill`: `prompt` follows `input_prefix`, as the line that is typed. With `n_predict` 0 it is only cached."""

    input_prefix: Text = ""
    input_suffix: Text = ""
    input_extra: Annotated[list[ExtraFile], Meta(max_length=1024)] | None = None
    prompt: Text = ""
    response_fields: Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=64)] | None = None
    n_indent: Annotated[Anything, ignored("the model indents")] = UNSET
    samplers: Annotated[Anything, ignored("samplers have one order")] = UNSET
    cache_prompt: Annotated[Anything, ignored("every prompt is looked for in the prefix cache")] = UNSET
    id_slot: Annotated[Anything, ignored("requests need no slot")] = UNSET
    t_max_prompt_ms: Annotated[Anything, _NO_TIME] = UNSET
    t_max_predict_ms: Annotated[Anything, _NO_TIME] = UNSET


async def complete(service: Service, exchange: Exchange, body: bodies.CompletionRequest, style: Style) -> None:
    """Continue a text in this style, up to its suffix if it has one."""
    if body.suffix:
        await _fill(service, exchange, body)
        style.shown = service.manager.texts.vocabulary.fill_in_ends  # stop tokens are hidden, special or not
    requests = generates(body, service.manager.config)
    await Generation(service.manager, exchange, style, requests, service.turns).run(bool(body.stream))


async def _fill(service: Service, exchange: Exchange, body: bodies.CompletionRequest) -> None:
    given = prompts(body.prompt, service.manager.config.server.limits.max_prompts)
    if body.echo:
        raise invalid("echo", "echo is of a prompt alone; leave suffix out")
    filled: list[str | int | list[int]] = []
    for prompt in given:
        if not isinstance(prompt, str):
            raise invalid("suffix", "suffix: the prompt before it must be a text, too")
        filled.append(await _prompt(service, exchange, body, (prompt, body.suffix or "")))
    body.prompt = filled


async def _prompt(
    service: Service,
    exchange: Exchange,
    body: Sampling,
    around: tuple[str, str],
    files: Sequence[File] = (),
    room: int | None = None,
) -> list[int]:
    """Return the ids of the prompt for the text between two others, and have `body` stop at the tokens that end it.

    With `room` for an answer, the prompt is cut to leave it."""
    service.check_ready()
    config, texts = service.manager.config, service.manager.texts
    blamed = "input_suffix" if isinstance(body, InfillRequest) else "suffix"
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


class InfillStyle(Style):
    """One choice as llama.cpp answers."""

    prompt = "input_prefix"
    end = b""

    def __init__(self, body: InfillRequest, name: str, vocabulary: Vocabulary) -> None:
        super().__init__(body, name, vocabulary)
        self.shown = vocabulary.fill_in_ends
        self._silent, self._fields = body.n_predict == 0, body.response_fields

    async def whole(self, choices: Sequence[Choice], each: Each) -> Any:
        (choice,) = choices
        if self._silent:
            take_back(choice)
        whole = msgspec.to_builtins(self._last(choice, "".join(choice.text)))
        return whole if self._fields is None else _chosen(whole, self._fields)

    def first(self, choice: Choice) -> list[answers.Infilling]:
        return []

    def events(self, choice: Choice, message: Chunk | Done) -> list[answers.Infilling]:
        text = "" if self._silent else message.text
        if isinstance(message, Done):
            if self._silent:
                take_back(choice)
            return [self._last(choice, text)]
        return [answers.Infilling(text, False, message.token_ids if self._with_ids else [])]

    def last(self, choices: Sequence[Choice]) -> list[answers.Infilling]:
        return []

    def _last(self, choice: Choice, text: str) -> answers.Infilled:
        end, made = choice.end, len(choice.token_ids)
        prompt_ms = end.metrics.time_to_first_token_ms - end.metrics.queue_time_ms
        new = end.usage.prompt_tokens - end.metrics.cached_tokens
        return answers.Infilled(
            content=text,
            stop=True,
            tokens=choice.token_ids if self._with_ids else [],
            model=self._named["model"],
            tokens_predicted=made,
            tokens_evaluated=end.usage.prompt_tokens,
            tokens_cached=end.metrics.cached_tokens,
            stop_type="eos" if end.finish_reason == "stop" else "limit",
            timings=answers.Timings(
                end.metrics.cached_tokens,
                new,
                prompt_ms,
                *_paces(new, prompt_ms),
                made,
                end.metrics.generation_time_ms,
                *_paces(made, end.metrics.generation_time_ms),
            ),
        )


def _paces(tokens: int, milliseconds: float) -> tuple[float, float]:
    """Return milliseconds a token and tokens a second; 0 where there are none."""
    return (milliseconds / tokens if tokens else 0.0), (1000 * tokens / milliseconds if milliseconds > 0 else 0.0)


def _chosen(whole: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    found = {}
    for field in fields:
        name, _, inner = field.partition("/")
        part = whole.get(name)
        if not inner and name in whole:
            found[field] = part
        elif isinstance(part, dict) and inner in part:
            found[field] = part[inner]
    return found


async def _infill(service: Service, exchange: Exchange) -> None:
    body = await service.read(exchange, InfillRequest)
    service.own(exchange, body)
    if (body.n or 1) > 1:
        raise invalid("n", "n is not supported here; /v1/completions has it", "unsupported_parameter")
    config = service.manager.config
    limit = config.max_model_len if body.n_predict is None or body.n_predict < 0 else max(1, body.n_predict)
    files = [File(extra.filename, extra.text) for extra in body.input_extra or ()]
    around, room = (body.input_prefix + body.prompt, body.input_suffix), min(limit, config.max_model_len // 4)
    ids = await _prompt(service, exchange, body, around, files, room)
    style = InfillStyle(body, f"infill-{exchange.id}", service.manager.texts.vocabulary)
    asked = Generate(0, token_ids=ids, params=sampling(body, config, max_tokens=limit, logprobs=None))
    await Generation(service.manager, exchange, style, [asked], service.turns).run(bool(body.stream))


_KINDS = InfillRequest, answers.Infilled, answers.Infilling
ROUTES = [Route("POST", "/infill", _infill, "Fill in the text between two others, as llama.cpp does.", *_KINDS)]
