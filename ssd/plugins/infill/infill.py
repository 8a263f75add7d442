"""llama.cpp's `/infill`, which editors ask. Functions raise HttpError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ssd.config.engine import ServerConfig
from ssd.frontend.detokenization import Vocabulary
from ssd.frontend.fill_in import File
from ssd.frontend.http.bodies import Sampling, Text
from ssd.frontend.http.completions import fill_in_prompt, take_back
from ssd.frontend.http.errors import invalid
from ssd.frontend.http.exchange import Exchange
from ssd.frontend.http.generation import Generation
from ssd.frontend.http.openapi import Route
from ssd.frontend.http.parameters import sampling
from ssd.frontend.http.service import Service
from ssd.frontend.http.style import Choice, Each, Style
from ssd.ipc.public import Chunk, Done, Generate


class ExtraFile(msgspec.Struct):
    """A part of another file that the model may look at."""

    text: Text
    filename: Annotated[str, Meta(max_length=4096)] = ""


class InfillRequest(Sampling, kw_only=True):
    """`/infill`: `prompt` follows `input_prefix`, as the line that is typed. With `n_predict` 0 it is only cached."""

    input_prefix: Text = ""
    input_suffix: Text = ""
    input_extra: Annotated[list[ExtraFile], Meta(max_length=1024)] | None = None
    prompt: Text = ""
    response_fields: Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=64)] | None = None


class Infilling(msgspec.Struct):
    """An event of a streamed `/infill` but the last."""

    content: str
    stop: bool
    tokens: list[int] = []


class Timings(msgspec.Struct):
    """llama.cpp's figures. `prompt_n` leaves out the tokens of the prefix cache."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class Infilled(Infilling, kw_only=True):
    """An answer of `/infill`, or the last event of a streamed one, whose `content` is what was held back."""

    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    stop_type: Literal["eos", "limit"]
    timings: Timings
    truncated: bool = False


class InfillStyle(Style):
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

    def events(self, choice: Choice, message: Chunk | Done) -> list[Infilling]:
        text = "" if self._silent else message.text
        if isinstance(message, Done):
            if self._silent:
                take_back(choice)
            return [self._last(choice, text)]
        return [Infilling(text, False, message.token_ids if self._with_ids else [])]

    def last(self, choices: Sequence[Choice]) -> list[Infilling]:
        return []

    def _last(self, choice: Choice, text: str) -> Infilled:
        end, made = choice.end, len(choice.token_ids)
        prompt_ms = end.metrics.time_to_first_token_ms - end.metrics.queue_time_ms
        new = end.usage.prompt_tokens - end.metrics.cached_tokens
        return Infilled(
            content=text,
            stop=True,
            tokens=choice.token_ids if self._with_ids else [],
            model=self._named["model"],
            tokens_predicted=made,
            tokens_evaluated=end.usage.prompt_tokens,
            tokens_cached=end.metrics.cached_tokens,
            stop_type="eos" if end.finish_reason == "stop" else "limit",
            timings=Timings(
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
    ids = await fill_in_prompt(service, exchange, body, "input_suffix", around, files, room)
    style = InfillStyle(body, f"infill-{exchange.id}", service.manager.texts.vocabulary)
    params = sampling(body, config, structured=style.form.structured, max_tokens=limit, logprobs=None)
    asked = Generate(0, token_ids=ids, params=params)
    await Generation(service.manager, exchange, style, [asked], service.turns).run(bool(body.stream))


_KINDS = InfillRequest, Infilled, Infilling


def routes(_: ServerConfig) -> list[Route]:
    return [Route("POST", "/infill", _infill, "Fill in the text between two others, as llama.cpp does.", *_KINDS)]
