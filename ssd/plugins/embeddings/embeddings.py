"""Texts to vectors: each input is a request with `SamplingParams.pooling`. Functions raise HttpError."""

from __future__ import annotations

import asyncio
import base64
import math
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias

import msgspec
from msgspec import UNSET, Meta

from ssd.config.engine import ServerConfig
from ssd.config.params import Pooling, SamplingParams
from ssd.errors import RequestError
from ssd.frontend.http.bodies import PROMPT, Anything, Name, Prompts, Sampling, Text, unsupported
from ssd.frontend.http.completions import prompts
from ssd.frontend.http.errors import HttpError, bare_error, invalid, refusal
from ssd.frontend.http.exchange import JSON, Exchange, Gone, encoder
from ssd.frontend.http.openapi import Route
from ssd.frontend.http.parameters import sampling
from ssd.frontend.http.service import Service
from ssd.frontend.request import Request
from ssd.ipc.public import Done, Failed, Generate

_Input: TypeAlias = str | list[int]
_MOST_INPUTS = 2048  # as many as OpenAI takes
_OPEN = 64  # inputs of one body that are open at once
_PART = 2**18  # bytes of an answer that are made before they are sent
_Dimensions = Annotated[int, Meta(ge=1, le=2**20, description="The first numbers of each vector, to its unit length.")]


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """`/v1/embeddings`, whose `input` is a text, token ids, or a list of either."""

    input: Annotated[Text | Prompts, Meta(extra_json_schema=PROMPT)]
    model: Name | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: _Dimensions | None = None
    # beyond OpenAI's
    pooling: Pooling | None = None
    normalize: Annotated[bool, Meta(description="Vectors have length 1; the default.")] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    add_special_tokens: Annotated[Anything, unsupported(True)] = UNSET


class EmbedRequest(msgspec.Struct, kw_only=True):
    """Ollama's `/api/embed`."""

    model: Name
    input: Text | Annotated[list[Text], Meta(max_length=_MOST_INPUTS)]
    truncate: bool | None = None
    dimensions: _Dimensions | None = None


class OldEmbedRequest(msgspec.Struct, kw_only=True):
    """Ollama's `/api/embeddings`."""

    model: Name
    prompt: Text


class Embedding(msgspec.Struct):
    """`embedding` has float32 numbers, or their little-endian bytes in Base64."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct):
    model: str
    usage: EmbeddingUsage
    data: list[Embedding]
    object: Literal["list"] = "list"


class _EmbeddingJob:
    """The embeddings of one HTTP request, some at a time. The end of its block ends what is open."""

    def __init__(self, service: Service, exchange: Exchange, inputs: Sequence[_Input], field: str) -> None:
        self._service, self._exchange, self._inputs, self._field = service, exchange, inputs, field
        self._vectors: list[array[float]] = [array("f")] * len(inputs)
        self._open: dict[int, Request] = {}
        self._news = asyncio.Event()
        self._gone = False
        self.tokens = 0

    def __enter__(self) -> Self:
        self._exchange.begin_use()
        self._exchange.when_gone(self._left)
        return self

    def __exit__(self, *_: object) -> None:
        self._exchange.when_gone(None)
        self._exchange.end_use(lambda: self.tokens + sum(len(request.prompt) for request in self._open.values()))
        for request in self._open.values():
            self._service.manager.cancel(request)

    async def compute(self, params: SamplingParams, dimensions: int | None = None, normalize: bool = True) -> None:
        """Get all vectors. Raises Gone, HttpError and RequestError."""
        todo, held = 0, 0
        while todo < len(self._inputs) or self._open:
            while todo < len(self._inputs) and self._has_room():
                self._ask(todo, params)
                todo += 1
            await self._news.wait()
            self._news.clear()
            for index, done in self._ended():
                vector = self._vectors[index] = _shaped(array("f", done.embedding or b""), dimensions, normalize)
                self.tokens += done.usage.prompt_tokens
                held += 4 * len(vector)
            self._exchange.hold(held)

    async def write(self, made: Callable[[int, array[float]], bytes], head: bytes, tail: bytes) -> None:
        """Send the JSON `made` of all vectors between `head` and `tail`, in parts. Raises Gone."""
        ready = bytearray(head)
        for index, vector in enumerate(self._vectors):
            if len(ready) > _PART:
                if not self._exchange.started:
                    await self._exchange.start_stream(JSON)
                await self._exchange.write(bytes(ready))
                ready.clear()
            async with self._service.turns:
                await asyncio.sleep(0)
            if self._gone:
                raise Gone
            ready += b"," * (index > 0) + made(index, vector)
        ready += tail
        if self._exchange.started:
            await self._exchange.write(bytes(ready), more=False)
        else:
            await self._exchange.reply(bytes(ready))

    def _left(self) -> None:
        self._gone = True
        self._news.set()

    def _has_room(self) -> bool:
        manager = self._service.manager
        room = manager.open_requests < manager.config.server.limits.max_open_requests
        return not self._open or (room and len(self._open) < _OPEN)

    def _ask(self, index: int, params: SamplingParams) -> None:
        given = self._inputs[index]
        text, ids = (given, None) if isinstance(given, str) else (None, given)
        message = Generate(index, text, ids, params=params)
        try:
            request = self._service.manager.open(
                message, lambda _: self._news.set(), trace=self._exchange.trace, reserve=self._exchange.reserve
            )
        except RequestError as error:
            raise self._refusal(index, error.code, str(error), error.param) from None
        self._open[index] = request
        self._news.set()  # it may have failed already

    def _refusal(self, index: int, code: str, message: str, param: str | None) -> HttpError:
        error = refusal(code, message, param or self._field)
        if len(self._inputs) > 1 and error.status in (400, 500):
            error.message = f"{self._field}[{index}]: {message}"
        return error

    def _ended(self) -> list[tuple[int, Done]]:
        """Return the results of requests that have ended. Raises HttpError for one that failed, and Gone."""
        if self._gone:
            raise Gone
        found = []
        for index, request in list(self._open.items()):
            if isinstance(end := request.output.head, Failed):
                raise self._refusal(index, end.code, end.message, request.blamed)
            if isinstance(end, Done):
                if end.embedding is None:  # the engine shuts down
                    raise refusal("shutting_down", "the request was ended without a result")
                del self._open[index]
                found.append((index, end))
        return found


async def _embeddings(service: Service, exchange: Exchange) -> None:
    body = await service.read(exchange, EmbeddingRequest)
    inputs = prompts(body.input, _MOST_INPUTS, "input")
    asked = Sampling(model=body.model, cache_salt=body.cache_salt, truncate_prompt_tokens=body.truncate_prompt_tokens)
    params = _params(service, exchange, asked, body.pooling)

    def made(index: int, vector: array[float]) -> bytes:
        value: Any = msgspec.Raw(_numbers(vector))
        if body.encoding_format == "base64":
            value = base64.b64encode(vector).decode()
        return encoder.encode(Embedding(index, value))

    with _EmbeddingJob(service, exchange, inputs, "input") as job:
        await job.compute(params, body.dimensions, body.normalize is not False)
        about = Embeddings(str(asked.model), EmbeddingUsage(job.tokens, job.tokens), [])
        head, tail = encoder.encode(about).rsplit(b"[]", 1)
        await job.write(made, head + b"[", b"]" + tail)


async def _embed(service: Service, exchange: Exchange) -> None:
    began = time.monotonic_ns()
    body = await service.read(exchange, EmbedRequest)
    texts = [body.input] if isinstance(body.input, str) else body.input
    asked = Sampling(model=body.model, truncate_prompt_tokens=None if body.truncate is False else -1)
    params = _params(service, exchange, asked)
    if not body.input:  # only loads the model
        service.check_ready()
        return await exchange.reply_json({"embeddings": [], **_told(body, began, 0)})
    with _EmbeddingJob(service, exchange, texts, "input") as job:
        await job.compute(params, body.dimensions)
        head = encoder.encode(_told(body, began, job.tokens))[:-1]
        await job.write(lambda _, vector: _numbers(vector), head + b',"embeddings":[', b"]}")


def _told(body: EmbedRequest, began: int, tokens: int) -> dict[str, str | int]:
    took = max(1, time.monotonic_ns() - began)  # clients divide by it
    return {"model": body.model, "total_duration": took, "load_duration": 0, "prompt_eval_count": tokens}


async def _old_embed(service: Service, exchange: Exchange) -> None:
    body = await service.read(exchange, OldEmbedRequest)
    params = _params(service, exchange, Sampling(model=body.model, truncate_prompt_tokens=-1))
    with _EmbeddingJob(service, exchange, [body.prompt], "prompt") as job:
        await job.compute(params, normalize=False)
        await job.write(lambda _, vector: _numbers(vector), b'{"embedding":', b"}")


def _params(service: Service, exchange: Exchange, asked: Sampling, pooling: Pooling | None = None) -> SamplingParams:
    service.own(exchange, asked)
    return sampling(asked, service.manager.config, max_tokens=1, pooling=pooling or "auto")


def _shaped(vector: array[float], dimensions: int | None, normalize: bool) -> array[float]:
    if dimensions is not None and dimensions > len(vector):
        raise invalid("dimensions", f"dimensions is {dimensions}; this model's vectors have {len(vector)}")
    vector = vector[:dimensions]
    length = math.hypot(*vector) if normalize else 1.0
    return array("f", [number / length for number in vector]) if length not in (0.0, 1.0) else vector


def _numbers(vector: array[float]) -> bytes:
    """Return a vector as JSON: nine digits tell any two float32 numbers apart."""
    return b"[%b]" % ",".join([f"{number:.9g}" for number in vector]).encode()


def routes(_: ServerConfig) -> list[Route]:
    return [
        Route("POST", "/v1/embeddings", _embeddings, "Texts or token ids to vectors.", EmbeddingRequest, Embeddings),
        Route("POST", "/api/embed", _embed, "Ollama's: texts to vectors.", EmbedRequest, dict, error=bare_error),
        Route("POST", "/api/embeddings", _old_embed, "The older one.", OldEmbedRequest, dict, error=bare_error),
    ]
