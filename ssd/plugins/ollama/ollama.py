"""Ollama's `/api/chat`, `/api/generate` and neighbours: chats and completions, streamed as lines."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw

from ssd.config.engine import ServerConfig
from ssd.errors import UsageError
from ssd.frontend.http import answers, bodies, chat, completions
from ssd.frontend.http.asked import AskedAnswer
from ssd.frontend.http.bodies import Anything, Name, Said, Text, unsupported
from ssd.frontend.http.errors import HttpError, bare_error, invalid
from ssd.frontend.http.exchange import Exchange, encoder
from ssd.frontend.http.openapi import LINES, Route
from ssd.frontend.http.parameters import agreed, check_one_choice
from ssd.frontend.http.service import Service
from ssd.frontend.http.structured import form_of
from ssd.frontend.http.style import Choice, Each
from ssd.frontend.parsers.answer import AnswerFormat
from ssd.ipc.public import Chunk, Done

_NOT_PASSED = {"model", "stream", "stream_options", "n_predict"}


class OllamaOptions(bodies.Sampling, kw_only=True):
    num_predict: int | None = None  # below 1: until the end; so is `n_predict`


class OllamaRequest(msgspec.Struct, kw_only=True):
    model: Name | None = None
    stream: bool | None = None  # true
    format: Literal["", "json"] | dict[str, Raw] | None = None
    options: OllamaOptions | None = None
    think: bool | bodies.Effort | None = None
    logprobs: bool | None = None
    top_logprobs: bodies.Alternatives | None = None


class OllamaShowRequest(OllamaRequest, kw_only=True):
    name: Annotated[Name, Meta(description="The older name of `model`.")] | None = None


class OllamaMessage(Said, kw_only=True):
    tool_name: Name | None = None
    thinking: Text | None = None
    images: Annotated[Anything, unsupported([])] = UNSET


class OllamaChatRequest(OllamaRequest, kw_only=True):
    messages: Annotated[list[OllamaMessage], Meta(max_length=1024)] | None = None
    tools: bodies.Tools | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    prompt: Text | None = None
    system: Text | None = None
    raw: bool | None = None  # a text to continue, and no chat
    suffix: Text | None = None
    images: Annotated[Anything, unsupported([])] = UNSET
    template: Annotated[Anything, unsupported("")] = UNSET
    context: Annotated[Anything, unsupported([])] = UNSET


def _shared(body: OllamaRequest) -> dict[str, Any]:
    """Return the fields that chats and completions have in common. Raises HttpError."""
    options = body.options or OllamaOptions()
    check_one_choice(options)
    if body.format and (other := form_of(options).field) is not None:
        raise invalid("format", f"format and options.{other} both say what the answer must be; give one")
    limit = agreed(num_predict=options.num_predict, n_predict=options.n_predict) or 0
    asked = {name: getattr(options, name) for name in {*bodies.Sampling.__struct_fields__} - _NOT_PASSED}
    asked |= {"model": body.model, "stream": body.stream is not False}
    asked["max_tokens"] = limit if limit > 0 else 2**31 - 1  # the context ends it
    if body.format == "json":
        asked["response_format"] = bodies.ResponseFormat("json_object")
    elif body.format:
        schema = bodies.JsonSchema(schema=Raw(encoder.encode(body.format)))
        asked["response_format"] = bodies.ResponseFormat("json_schema", schema)
    return asked


def as_chat(body: OllamaRequest, messages: list[Said]) -> bodies.ChatRequest:
    effort = (body.think or None) if isinstance(body.think, str) else None
    thinks = {} if body.think is None else {"enable_thinking": Raw(encoder.encode(bool(body.think)))}
    asked = _shared(body) | {name: getattr(body, name, None) for name in ("logprobs", "top_logprobs", "tools")}
    return bodies.ChatRequest(messages=messages, reasoning_effort=effort, chat_template_kwargs=thinks, **asked)


def _conversation(messages: list[OllamaMessage]) -> list[OllamaMessage]:
    for one in messages:
        one.name, one.content = one.tool_name or one.name, one.content or ""
        one.reasoning_content = one.thinking or one.reasoning_content
    return messages


def _line(model: Any, texts: bool, said: answers.Delta | answers.AssistantMessage, **more: Any) -> dict[str, Any]:
    shown: dict[str, Any] = {"response" if texts else "content": said.content or ""}
    if said.reasoning_content:
        shown["thinking"] = said.reasoning_content
    for call in said.tool_calls or ():  # line ends in arguments only stand between the parts of JSON
        arguments = Raw(call.function.arguments.translate({10: " ", 13: " "}).encode())
        called = {"id": call.id, "function": {"name": call.function.name, "arguments": arguments}}
        shown.setdefault("tool_calls", []).append(called)
    answer = shown if texts else {"message": {"role": "assistant", **shown}}
    return {"model": model, "created_at": datetime.now(UTC).isoformat(), **answer, "done": False, **more}


class OllamaStyle(chat.ChatStyle):
    end, kind = b"", LINES.encode()
    error = staticmethod(bare_error)

    def __init__(self, texts: bool, *given: Any) -> None:
        super().__init__(*given)
        self._line = partial(_line, self._named["model"], texts)
        if self.form.field == "response_format":
            self.form = self.form._replace(field="format")

    async def whole(self, choices: Any, each: Each) -> Any:
        choice, told = choices[0], {}
        if self._with_logprobs:
            told["logprobs"] = await each(self._content_logprob, self._of_content(choice, choice.logprobs) or [])
        return self._line(self._message(choice), **told, **_end(choice.end))

    def first(self, choice: Choice) -> list[Any]:
        return []

    def events(self, choice: Choice, message: Chunk | Done) -> list[Any]:
        deltas = self._deltas(choice, message)
        lines = [self._line(one) for one in deltas if one.content or one.reasoning_content or one.tool_calls]
        if isinstance(message, Done):
            return [*lines, self._line(answers.Delta(), **_end(message))]
        if self._with_logprobs and (entries := self._of_content(choice, message.logprobs)):
            lines = lines or [self._line(answers.Delta())]
            lines[0]["logprobs"] = list(map(self._content_logprob, entries))
        return lines

    def encode(self, event: Any) -> bytes:
        return encoder.encode(event) + b"\n"


def _end(done: Done) -> dict[str, Any]:
    """Return the fields of the last line. Its nanoseconds are above 0: clients divide by them."""
    first, rest = done.metrics.time_to_first_token_ms, done.metrics.generation_time_ms
    times = {"total": first + rest, "prompt_eval": first - done.metrics.queue_time_ms, "eval": rest}
    counts = {"prompt_eval_count": done.usage.prompt_tokens, "eval_count": done.usage.completion_tokens}
    durations = {f"{name}_duration": max(1, round(ms * 1e6)) for name, ms in times.items()}
    return {"done": True, "done_reason": done.finish_reason, "load_duration": 0, **counts, **durations}


async def _chat(service: Service, exchange: Exchange) -> None:
    body = await service.read(exchange, OllamaChatRequest)
    await _answer(service, exchange, body, [*_conversation(body.messages or [])])


async def _generate(service: Service, exchange: Exchange) -> None:
    body = await service.read(exchange, OllamaGenerateRequest)
    said = [Said("system", body.system or ""), Said("user", body.prompt or "")]
    await _answer(service, exchange, body, [one for one in said if one.content and body.prompt])


async def _answer(service: Service, exchange: Exchange, body: OllamaRequest, said: list[Said]) -> None:
    """Answer messages, or the text in them; without any, only say that the model is loaded."""
    service.check_ready()
    body.model = body.model or service.manager.config.server.names[0]
    vocabulary, format = service.manager.texts.vocabulary, service.manager.texts.answer_format
    if body.think and not (format.reasoning or vocabulary.template.takes_thinking):
        raise invalid("think", f"{body.model} does not support thinking", "unsupported_parameter")
    texts, asked = isinstance(body, OllamaGenerateRequest), as_chat(body, said)
    if not said:
        return await exchange.reply_json(_line(body.model, texts, answers.Delta(), done=True, done_reason="load"))
    if not isinstance(body, OllamaGenerateRequest) or (vocabulary.has_chat and not body.raw and not body.suffix):
        return await service.converse(exchange, asked, OllamaStyle, partial(OllamaStyle, texts))
    tops = (body.top_logprobs or 0) if body.logprobs else None
    text = bodies.CompletionRequest(prompt=body.prompt or "", logprobs=tops, suffix=body.suffix, **_shared(body))
    service.own(exchange, text)
    plain = AnswerFormat(ServerConfig(tool_call_parser="none", reasoning_parser="none"), vocabulary)
    style = OllamaStyle(texts, asked, exchange.id, vocabulary, plain, AskedAnswer(form_of(text)))
    await completions.complete(service, exchange, text, style)


async def _models(service: Service, exchange: Exchange) -> None:
    if shows := exchange.scope["method"] == "POST":
        service.check_model((await service.read(exchange, OllamaShowRequest)).name)
    service.check_ready()
    config, texts = service.manager.config, service.manager.texts
    details, nbytes = await asyncio.to_thread(described, config.target)
    family = details["family"]
    takes_tools = texts.vocabulary.has_chat and not texts.answer_format.refuses_tools
    can = {"completion": True, "tools": takes_tools, "thinking": texts.answer_format.reasoning}
    info = {"general.architecture": family, "general.basename": config.target_name}
    facts = {
        "modified_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
        "expires_at": "9999-12-31T23:59:59Z",
        "size": nbytes,
        "digest": config.digest,
        "details": details,
        "capabilities": [name for name, able in can.items() if able],
        "model_info": {**info, f"{family}.context_length": config.max_model_len},
        "template": "",
    }
    names = [name if ":" in name else f"{name}:latest" for name in config.server.names]
    lists = {"models": [{"name": name, "model": name, **facts} for name in names]}
    await exchange.reply_json(facts if shows else lists)


@cache
def described(directory: str) -> tuple[dict[str, Any], int]:
    """Return the details of a checkpoint and its bytes; empty ones of a checkpoint that cannot be read any more."""
    from ssd.models.checkpoint import inspect  # a MiB that few frontends need
    from ssd.models.gguf.tensors import gguf_files

    format, family, dtypes, parameters, nbytes = "", "", Counter[str](), 0, 0
    with suppress(UsageError, OSError):
        model = inspect(Path(directory))
        for tensor in model.tensors.values():
            dtypes[tensor.dtype] += tensor.nbytes
            parameters += math.prod(tensor.shape)
        format = "gguf" if gguf_files(model.directory) else "safetensors"
        family, nbytes = model.config["model_type"], model.nbytes
    size = f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"
    details = {"format": format, "family": family, "families": [family], "parameter_size": size}
    return {**details, "quantization_level": max(dtypes, key=dtypes.__getitem__, default="")}, nbytes


async def _version(service: Service, exchange: Exchange) -> None:
    await exchange.reply_json({"version": "0.12.11"})  # this is like; clients refuse older ones


async def _elsewhere(service: Service, exchange: Exchange) -> None:
    name = service.manager.config.target_name
    raise HttpError(404, f"there is no {exchange.scope['path']}; {name} was loaded at the start", "not_found")


async def _greet(_: Service, exchange: Exchange) -> None:
    await exchange.reply(b"Ollama is running", kind=b"text/plain; charset=utf-8")


_ROUTES = [
    Route("POST", "/api/chat", _chat, "Continue a conversation, as Ollama does.", OllamaChatRequest, dict, dict),
    Route("POST", "/api/generate", _generate, "Answer a text, as Ollama does.", OllamaGenerateRequest, dict, dict),
    Route("POST", "/api/show", _models, "Describe the model.", OllamaShowRequest, dict),
    Route("GET", "/api/tags", _models, "List what is served.", answer=dict),
    Route("GET", "/api/ps", _models, "List what is loaded.", answer=dict),
    Route("GET", "/api/version", _version, "The version of Ollama that this interface is like.", answer=dict),
    *(Route(method, "/api/{model}", _elsewhere, "Not here.") for method in ("GET", "POST", "DELETE")),
]


def routes(_: ServerConfig) -> list[Route]:
    """Return the routes of this door. The chat page takes the place of the greeting at `/`."""
    greeting = Route("GET", "/", _greet, "", open=True)
    return [greeting, *(route._replace(error=bare_error, stream=LINES) for route in _ROUTES)]
