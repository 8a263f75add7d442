"""`/v1/messages` and `/v1/messages/count_tokens`, as chats. Functions raise HttpError."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import Raw

from ssd.config.engine import ServerConfig
from ssd.frontend.http.asked import new_id
from ssd.frontend.http.bodies import ChatRequest
from ssd.frontend.http.errors import HttpError
from ssd.frontend.http.exchange import Exchange, encoder
from ssd.frontend.http.openapi import Route
from ssd.frontend.http.service import Service
from ssd.frontend.http.style import Choice, Each, GrowingAnswer, ParsingStyle
from ssd.frontend.parsers.tools import ToolCall
from ssd.ipc.public import Chunk, Done
from ssd.plugins.anthropic.bodies import MessageRequest, without_alias
from ssd.plugins.anthropic.conversation import CALL, as_chat

_Event: TypeAlias = dict[str, Any]
_REQUEST_ID = b"request-id"  # a header that Anthropic's SDKs read
_SIGNATURE = "unsigned"  # clients want some signature of thoughts
_REASONS = {"stop": "end_turn", "length": "max_tokens", "abort": "max_tokens"}
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessageUsage(msgspec.Struct):
    """Token counts. `input_tokens` are those of the prompt that the prefix cache did not have."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class MessageAnswer(msgspec.Struct, kw_only=True):
    """An answer of `/v1/messages`. Blocks of `content` have the types `thinking`, `text` and `tool_use`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]] = []
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class Counted(msgspec.Struct):
    input_tokens: int


class MessageErrorDetail(msgspec.Struct):
    type: str
    message: str


class MessageError(msgspec.Struct):
    error: MessageErrorDetail
    request_id: str | None = None
    type: Literal["error"] = "error"


def error_object(error: HttpError, request_id: str | None = None) -> MessageError:
    kind = _KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    if request_id is not None:
        error.headers[_REQUEST_ID] = request_id.encode()
    return MessageError(MessageErrorDetail(kind, error.message), request_id)


class MessageStyle(ParsingStyle):
    prompt = "messages"
    prefix = "msg_"
    end = b""

    def __init__(self, body: MessageRequest, *given: Any) -> None:
        super().__init__(*given)
        self._parses = True
        if self.form.field == "response_format" and body.response_format is None:
            self.form = self.form._replace(field="output_config.format")
        self._blocks = _Blocks()

    async def whole(self, choices: Sequence[Choice], each: Each) -> MessageAnswer:
        for part in choices[0].parts:
            self._blocks.add(part)
        self._blocks.close()
        ended = self._ended(choices[0])
        return self._answer(content=self._blocks.content, usage=self._used(choices[0]), **ended)

    def first(self, choice: Choice) -> list[_Event]:
        message = self._answer(usage=MessageUsage(len(choice.request.prompt), 0))
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def events(self, choice: Choice, message: Chunk | Done) -> list[_Event]:
        events = self._blocks.add(choice.parts[-1])
        if isinstance(message, Done):
            events += self._blocks.close()
            events.append({"type": "message_delta", "delta": self._ended(choice), "usage": self._used(choice)})
            events.append({"type": "message_stop"})
        return events

    def error(self, error: HttpError) -> MessageError:
        return error_object(error, self._named["id"].removeprefix(self.prefix))

    def encode(self, event: Any) -> bytes:
        kind = event.type if isinstance(event, MessageError) else event["type"]
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), encoder.encode(event))

    def _answer(self, **fields: Any) -> MessageAnswer:
        return MessageAnswer(id=self._named["id"], model=self._named["model"], **fields)

    def _ended(self, choice: Choice) -> dict[str, str | None]:
        reason, detokenizer = choice.end.finish_reason, choice.request.detokenizer
        stop = None if detokenizer is None or reason != "stop" else detokenizer.matched
        found = "stop_sequence" if stop is not None else _REASONS[reason]
        if choice.calls and reason == "stop":
            found, stop = "tool_use", None
        return {"stop_reason": found, "stop_sequence": stop}

    def _used(self, choice: Choice) -> MessageUsage:
        usage, cached = choice.end.usage, choice.end.metrics.cached_tokens
        return MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)


class _Blocks(GrowingAnswer):
    """The growing blocks of an answer, and their events. A text of white space alone is no block."""

    kinds = ("thinking", "text")

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        self._kind = ""  # of the open block
        self._text: list[str] = []  # of it
        self._blank = ""  # white space that may begin a block

    def close(self) -> list[_Event]:
        kind, self._kind, self._blank = self._kind, "", ""
        if not kind:
            return []
        block, events = self.content[-1], []
        block[kind] = "".join(self._text)
        if kind == "thinking":
            block["signature"] = _SIGNATURE
            events.append(self._delta("signature_delta", signature=_SIGNATURE))
        return [*events, self._of_block("stop")]

    def _add_text(self, kind: str, text: str) -> list[_Event]:
        """Add text to the open block of this kind, or to a new one, whose field has the kind's name."""
        events = []
        if kind != self._kind:
            text, self._blank = self._blank + text, ""
            if not text.strip():
                self._blank = text
                return []
            events = self.close()
            self._kind, self._text = kind, []
            block = {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
            self.content.append(block)
            events.append(self._of_block("start", content_block={**block}))
        self._text.append(text)
        return [*events, self._delta(f"{kind}_delta", **{kind: text})] if text else events

    def _add_call(self, call: ToolCall) -> list[_Event]:
        events = self.close()
        block = {"type": "tool_use", "id": f"{CALL}{new_id()}", "name": call.name, "input": {}}
        self.content.append(block | {"input": Raw(call.arguments.encode())})
        return [
            *events,
            self._of_block("start", content_block=block),
            self._delta("input_json_delta", partial_json=call.arguments),
            self._of_block("stop"),
        ]

    def _of_block(self, what: str, **fields: Any) -> _Event:
        return {"type": f"content_block_{what}", "index": len(self.content) - 1, **fields}

    def _delta(self, kind: str, **fields: Any) -> _Event:
        return self._of_block("delta", delta={"type": kind, **fields})


# -- endpoints ------------------------------------------------------------------------------------------------------


def model_info(service: Service, name: str) -> dict[str, Any]:
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(service.created))
    about = {"id": name, "display_name": name, "created_at": created, "type": "model", "lifecycle": "active"}
    return {**about, "max_input_tokens": service.manager.config.max_model_len}


async def _asked(service: Service, exchange: Exchange) -> tuple[MessageRequest, ChatRequest]:
    exchange.more_headers = {**exchange.more_headers, _REQUEST_ID: exchange.id.encode()}
    body = await service.read(exchange, MessageRequest)
    service.check_ready()
    return body, as_chat(body, service.manager.texts.vocabulary.template.takes_thinking)


async def _message(service: Service, exchange: Exchange) -> None:
    body, asked = await _asked(service, exchange)
    await service.converse(exchange, asked, MessageStyle, partial(MessageStyle, body))


async def _count_tokens(service: Service, exchange: Exchange) -> None:
    _, asked = await _asked(service, exchange)
    await exchange.reply_json(Counted(await service.count_tokens(exchange, asked, MessageStyle.prompt)))


async def _models(service: Service, exchange: Exchange) -> None:
    names = service.manager.config.server.names
    found = [model_info(service, name) for name in names]
    await exchange.reply_json({"data": found, "first_id": names[0], "last_id": names[-1], "has_more": False})


async def _model(service: Service, exchange: Exchange) -> None:
    name = without_alias(exchange.path["model"]) or service.manager.config.server.names[0]
    service.check_model(name)
    await exchange.reply_json(model_info(service, name))


_TYPES = MessageRequest, MessageAnswer, MessageAnswer
_COUNTED = MessageRequest, Counted
_route = partial(Route, "POST", error=error_object, clients="Anthropic's clients take a base URL without /v1")
_listed = partial(Route, "GET", summary="", error=error_object, header=b"anthropic-version")


def routes(_: ServerConfig) -> list[Route]:
    return [
        _route("/v1/messages", _message, "Continue a conversation of blocks.", *_TYPES),
        _route("/v1/messages/count_tokens", _count_tokens, "The tokens of a conversation's prompt.", *_COUNTED),
        _listed("/v1/models", _models),
        _listed("/v1/models/{model}", _model),
    ]
