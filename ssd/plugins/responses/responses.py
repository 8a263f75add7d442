"""`/v1/responses` as chats, and the responses that are kept. Functions raise HttpError."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias
from urllib.parse import parse_qsl

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from ssd.config.engine import ServerConfig
from ssd.frontend.http.answers import PromptDetails
from ssd.frontend.http.asked import new_id
from ssd.frontend.http.bodies import ChatRequest
from ssd.frontend.http.errors import HttpError, cut, invalid
from ssd.frontend.http.exchange import Exchange, encoder
from ssd.frontend.http.openapi import Route
from ssd.frontend.http.service import Service
from ssd.frontend.http.style import Choice, Each, GrowingAnswer, ParsingStyle
from ssd.frontend.parsers.tools import ToolCall
from ssd.frontend.request import Request
from ssd.ipc.public import Chunk, Done
from ssd.plugins.responses import answers
from ssd.plugins.responses.bodies import InputItem, ResponseRequest
from ssd.plugins.responses.conversation import as_chat, format_of, functions, given_items, kept, stored
from ssd.plugins.responses.store import MOST_BYTES, MOST_RESPONSES, Item, ResponseStore, Turn

_Event: TypeAlias = dict[str, Any]
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseStyle(ParsingStyle):
    """One choice as items and events. `keep` keeps the response, or returns False without room."""

    prompt = "input"
    end = b""

    def __init__(
        self,
        body: ResponseRequest,
        name: str,
        keep: Callable[[answers.Response], bool] | None,
        asked: ChatRequest,
        _: str,
        *given: Any,
    ) -> None:
        super().__init__(asked, name, *given)
        self._parses = True
        if self.form.field == "response_format" and body.response_format is None:
            self.form = self.form._replace(field="text.format")
        self._numbers = itertools.count()
        self._items = _Items(name)
        self._keep = keep
        self._begun = self._new_response(body, name)
        self._response = replace(self._begun)
        self._request: Request | None = None
        self._cancelled = False

    def _new_response(self, body: ResponseRequest, name: str) -> answers.Response:
        return answers.Response(
            id=f"resp_{name}",
            created_at=self._named["created"],
            model=self._named["model"],
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata={} if body.metadata in (UNSET, b"null") else body.metadata,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            store=self._keep is not None,
            temperature=body.temperature,
            text={"format": format_of(body)},
            tool_choice=body.tool_choice or "auto",
            tools=functions(body),
            top_p=body.top_p,
        )

    @property
    def so_far(self) -> answers.Response:
        output = [item for item in self._items.output if item["status"] != "in_progress"]
        return replace(self._response, output=output, status="cancelled" if self._cancelled else "in_progress")

    def cancel(self) -> Request:
        assert self._request is not None, "its stream has begun"
        self._cancelled = True
        return self._request

    async def whole(self, choices: Sequence[Choice], each: Each) -> answers.Response:
        for part in choices[0].parts:
            self._items.add(part)
        self._finish(choices[0])
        return self._response

    def first(self, choice: Choice) -> list[_Event]:
        self._request = choice.request
        return [_event(f"response.{kind}", response=self._begun) for kind in ("created", "in_progress")]

    def events(self, choice: Choice, message: Chunk | Done) -> list[_Event]:
        events = self._items.add(choice.parts[-1])
        if isinstance(message, Done):
            events += self._finish(choice)
            end = "completed" if self._response.status == "completed" else "incomplete"
            events.append(_event(f"response.{end}", response=self._response))
        return events

    def error(self, error: HttpError) -> _Event:
        return _event("error", code=error.code, message=error.message, param=error.param)

    def encode(self, event: _Event) -> bytes:
        numbered = {**event, "sequence_number": next(self._numbers)}
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encoder.encode(numbered))

    def _finish(self, choice: Choice) -> list[_Event]:
        done, response = choice.end, self._response
        complete = done.finish_reason == "stop"
        if not complete:
            reason = "max_output_tokens" if done.finish_reason == "length" else done.finish_reason
            response.incomplete_details = {"reason": reason}
        events = self._items.close("completed" if complete else "incomplete")
        response.status = "completed" if complete else "cancelled" if self._cancelled else "incomplete"
        response.output = self._items.output
        usage = self._usage([choice])
        response.usage = answers.ResponseUsage(
            usage.prompt_tokens,
            PromptDetails(done.metrics.cached_tokens),
            usage.completion_tokens,
            answers.OutputDetails(),
            usage.total_tokens,
        )
        response.store = self._keep is not None and self._keep(response)
        return events


class _Items(GrowingAnswer):
    kinds = ("reasoning", "message")

    def __init__(self, name: str) -> None:
        self.output: list[dict[str, Any]] = []
        self._name = name
        self._kind = ""  # of the open item
        self._text: list[str] = []  # of it

    def _add_call(self, call: ToolCall) -> list[_Event]:
        events, kind = self.close(), "response.function_call_arguments"
        called = {"type": "function_call", "id": self._new_id("fc"), "call_id": new_id(), "name": call.name}
        item = {**called, "arguments": call.arguments, "status": "completed"}
        self.output.append(item)
        return [
            *events,
            self._of_item("response.output_item.added", item={**called, "arguments": "", "status": "in_progress"}),
            self._of_item(f"{kind}.delta", item_id=item["id"], delta=call.arguments),
            self._of_item(f"{kind}.done", item_id=item["id"], name=call.name, arguments=call.arguments),
            self._of_item("response.output_item.done", item=item),
        ]

    def close(self, status: str = "completed") -> list[_Event]:
        if not self._kind:
            return []
        part, text = _PARTS[self._kind], "".join(self._text)
        item, self._kind = self.output[-1], ""
        item |= {"status": status, "content": [_part(part, text)]}
        return [
            self._of_part(f"response.{part}.done", text=text, **_no_logprobs(part)),
            self._of_part("response.content_part.done", part=_part(part, text)),
            self._of_item("response.output_item.done", item=item),
        ]

    def _add_text(self, kind: str, text: str) -> list[_Event]:
        if not text:
            return []
        events, part = [], _PARTS[kind]
        if kind != self._kind:
            events = self.close()
            self._kind, self._text = kind, []
            item: dict[str, Any] = {"type": kind, "id": self._new_id("msg" if kind == "message" else "rs")}
            item |= {"status": "in_progress", "content": []}
            item["role" if kind == "message" else "summary"] = "assistant" if kind == "message" else []
            self.output.append(item)
            events.append(self._of_item("response.output_item.added", item={**item}))
            events.append(self._of_part("response.content_part.added", part=_part(part, "")))
        self._text.append(text)
        return [*events, self._of_part(f"response.{part}.delta", delta=text, **_no_logprobs(part))]

    def _new_id(self, kind: str) -> str:
        return f"{kind}_{self._name}_{len(self.output)}"

    def _of_item(self, type: str, **fields: Any) -> _Event:
        return _event(type, output_index=len(self.output) - 1, **fields)

    def _of_part(self, type: str, **fields: Any) -> _Event:
        return self._of_item(type, item_id=self.output[-1]["id"], content_index=0, **fields)


def _event(type: str, **fields: Any) -> _Event:
    return {"type": type, **fields}


def _part(type: str, text: str) -> dict[str, Any]:
    more: dict[str, Any] = {"annotations": []} if type == "output_text" else {}
    return {"type": type, "text": text, **more, **_no_logprobs(type)}


def _no_logprobs(type: str) -> dict[str, Any]:
    return {"logprobs": []} if type == "output_text" else {}


# -- endpoints ------------------------------------------------------------------------------------------------------


class _Stores:
    """The kept responses of each client's API key. Keys share the memory in equal parts."""

    def __init__(self, service: Service) -> None:
        self._most_bytes = MOST_BYTES // max(1, len(service.keys))
        self._of: dict[bytes, ResponseStore] = {}

    def of(self, key: bytes) -> ResponseStore:
        if key not in self._of:
            self._of[key] = ResponseStore(MOST_RESPONSES, self._most_bytes)
        return self._of[key]


def _store(service: Service, exchange: Exchange) -> ResponseStore:
    return service.of_door(_Stores).of(exchange.key)


async def _response(service: Service, exchange: Exchange) -> None:
    body = await service.read(exchange, ResponseRequest)
    store, name = _store(service, exchange), secrets.token_hex(16)
    asked, items, previous = _conversation(body, service, exchange)

    def keep(response: answers.Response) -> bool:
        output = [Item(item["id"], encoder.encode(item)) for item in response.output]
        return store.add(response.id, Turn(response, kept(body, items, name), output, previous))

    def style(*given: Any) -> ResponseStyle:
        made = ResponseStyle(body, name, keep if body.store is not False else None, *given)
        if body.stream:
            store.running[f"resp_{name}"] = made
        return made

    try:
        await service.converse(exchange, asked, ResponseStyle, style)
    finally:
        store.running.pop(f"resp_{name}", None)


def _conversation(
    body: ResponseRequest, service: Service, exchange: Exchange
) -> tuple[ChatRequest, list[InputItem], Turn | None]:
    store, kept = _store(service, exchange), list[Item]()
    items = given_items(body, store, service.manager.config.server.limits.max_body_bytes)
    previous = None
    if body.previous_response_id is not None:
        previous = store.find(body.previous_response_id, "previous_response_id")
        kept = previous.conversation()
        exchange.hold_more(sum(len(item.data) for item in kept))
    return as_chat(body, items, [stored.decode(item.data) for item in kept]), items, previous


async def _input_tokens(service: Service, exchange: Exchange) -> None:
    body = await service.read(exchange, ResponseRequest)
    asked, *_ = _conversation(body, service, exchange)
    await exchange.reply_json(answers.InputTokens(await service.count_tokens(exchange, asked, ResponseStyle.prompt)))


async def _retrieve(service: Service, exchange: Exchange) -> None:
    if _query(exchange).get("stream", "false").lower() not in ("false", "0"):
        raise invalid("stream", "a response that is kept cannot be streamed again", "unsupported_parameter")
    store, name = _store(service, exchange), exchange.path["response_id"]
    running = store.running.get(name)
    await exchange.reply_json(running.so_far if running is not None else store.find(name).response)


async def _delete(service: Service, exchange: Exchange) -> None:
    name = exchange.path["response_id"]
    _store(service, exchange).remove(name)
    await exchange.reply_json(answers.DeletedResponse(name))


async def _cancel(service: Service, exchange: Exchange) -> None:
    store, name = _store(service, exchange), exchange.path["response_id"]
    running = store.running.get(name)
    if running is None:
        store.find(name)
        raise invalid("response_id", "this response has ended: there is nothing to cancel", "invalid_request")
    service.manager.abort(running.cancel())
    await exchange.reply_json(running.so_far)


async def _input_items(service: Service, exchange: Exchange) -> None:
    """Send a page of the conversation that a response has answered, by default the latest item first."""
    turn, query = _store(service, exchange).find(exchange.path["response_id"]), _query(exchange)
    items = [*(turn.previous.conversation() if turn.previous is not None else ()), *turn.input]
    order, limit, after = query.get("order", "desc"), query.get("limit", "20"), query.get("after")
    if order not in ("asc", "desc"):
        raise invalid("order", "order must be asc or desc")
    if not re.fullmatch("[1-9][0-9]?|100", limit):
        raise invalid("limit", "limit must be from 1 to 100")
    if order == "desc":
        items.reverse()
    if after is not None:
        names = [item.id for item in items]
        if after not in names:
            raise invalid("after", f"after: there is no item {cut(after)!r} in the input")
        items = items[names.index(after) + 1 :]
    page, more = items[: int(limit)], len(items) > int(limit)
    data = [msgspec.Raw(item.data) for item in page]
    await exchange.reply_json(
        answers.InputItems(data, page[0].id if page else None, page[-1].id if page else None, more)
    )


def _query(exchange: Exchange) -> dict[str, str]:
    return dict(parse_qsl(exchange.scope["query_string"].decode("latin-1"), keep_blank_values=True))


_KINDS = ResponseRequest, answers.Response, answers.Response
_COUNTED = ResponseRequest, answers.InputTokens
_ONE = "/v1/responses/{response_id}"


def routes(_: ServerConfig) -> list[Route]:
    return [
        Route("POST", "/v1/responses", _response, "Continue a conversation of items.", *_KINDS),
        Route("POST", "/v1/responses/input_tokens", _input_tokens, "Count the tokens of its prompt.", *_COUNTED),
        Route("GET", _ONE, _retrieve, "A response that is kept.", answer=answers.Response),
        Route("DELETE", _ONE, _delete, "Forget it.", answer=answers.DeletedResponse),
        Route("POST", f"{_ONE}/cancel", _cancel, "End one whose stream runs.", answer=answers.Response),
        Route("GET", f"{_ONE}/input_items", _input_items, "The items that it answers.", answer=answers.InputItems),
    ]
