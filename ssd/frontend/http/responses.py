"""`/v1/responses`: its requests as chats, and its JSON; nothing is stored.

Functions raise HttpError for a field that is wrong."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

from msgspec import UNSET
from msgspec.structs import replace

from ssd.frontend.detokenization import Vocabulary
from ssd.frontend.http import answers
from ssd.frontend.http.bodies import (
    CalledFunction,
    ChatRequest,
    ChosenFunction,
    ChosenTool,
    Function,
    FunctionName,
    InputItem,
    ItemPart,
    JsonSchema,
    ResponseFormat,
    ResponseRequest,
    Said,
    SaidCall,
    Sampling,
    TextFormat,
    Tool,
)
from ssd.frontend.http.errors import HttpError, invalid, missing
from ssd.frontend.http.exchange import Exchange, encoder
from ssd.frontend.http.openapi import Route
from ssd.frontend.http.service import Service
from ssd.frontend.http.style import Choice, Each, ParsingStyle
from ssd.frontend.http.tools import Offer, new_id
from ssd.frontend.parsers.answer import Answer, AnswerFormat
from ssd.frontend.parsers.reasoning import Thought
from ssd.frontend.parsers.tools import ToolCall
from ssd.ipc.public import Chunk, Done

_Event: TypeAlias = dict[str, Any]
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


def as_chat(body: ResponseRequest) -> ChatRequest:
    """Return the chat that a request asks for."""
    for name in ("n", "prompt_logprobs", "return_token_ids", "return_metrics"):
        if getattr(body, name) not in (None, False, 1):
            raise invalid(name, f"{name} is not supported here; /v1/chat/completions has it", "unsupported_parameter")
    choice = body.tool_choice
    return ChatRequest(
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens,
        tools=[
            Tool("function", Function(tool.name, tool.description, tool.parameters, tool.strict))
            for tool in body.tools or ()
        ],
        tool_choice=ChosenTool("function", FunctionName(choice.name)) if isinstance(choice, ChosenFunction) else choice,
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        **{name: getattr(body, name) for name in Sampling.__struct_fields__} | _response_format(body),
    )


def _format(body: ResponseRequest) -> TextFormat:
    return (body.text and body.text.format) or TextFormat(type="text")


def _response_format(body: ResponseRequest) -> dict[str, ResponseFormat]:
    """Return `text.format` as a field of a chat."""
    format = _format(body)
    if format.type == "text":
        return {}
    if body.response_format is not None:
        raise invalid("text.format", "text.format and response_format both say what the answer must be; give one")
    if format.type == "json_schema" and format.schema in (UNSET, b"null"):
        raise missing("text.format.schema")
    return {"response_format": ResponseFormat(format.type, JsonSchema(format.schema, strict=format.strict))}


# -- items to messages ----------------------------------------------------------------------------------------------


def _messages(body: ResponseRequest) -> list[Said]:
    """Return the conversation, with thoughts, text and calls that follow each other as one message."""
    said = [] if body.instructions is None else [Said("system", body.instructions)]
    items = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    for index, item in enumerate(items):
        where = f"input[{index}]"
        if item.type == "function_call_output":
            call_id = _given(item.call_id, f"{where}.call_id")
            said.append(Said("tool", _text(_given(item.output, f"{where}.output")), tool_call_id=call_id))
        elif item.type == "message" and item.role != "assistant":
            role = _given(item.role, f"{where}.role")
            said.append(Said(role, _text(_given(item.content, f"{where}.content"))))
        else:
            _add_to_assistant(said, item, where)
    return said


def _add_to_assistant(said: list[Said], item: InputItem, where: str) -> None:
    """Add an item of an assistant to its message, or begin one."""
    begins = not said or said[-1].role != "assistant" or (item.type != "function_call" and bool(said[-1].tool_calls))
    if begins or (item.type == "message" and said[-1].content):
        said.append(Said("assistant", "", []))
    message = said[-1]
    if item.type == "reasoning":
        message.reasoning_content = (message.reasoning_content or "") + _text(item.content or "")
    elif item.type == "message":
        message.content = _text(_given(item.content, f"{where}.content"))
    else:
        function = CalledFunction(
            _given(item.name, f"{where}.name"), _given(item.arguments, f"{where}.arguments") or "{}"
        )
        assert message.tool_calls is not None, "those made here have a list"
        message.tool_calls.append(SaidCall(_given(item.call_id, f"{where}.call_id"), function))


def _text(content: str | list[ItemPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _given(value: Any, name: str) -> Any:
    if value is None:
        raise missing(name)
    return value


# -- answers --------------------------------------------------------------------------------------------------------


class ResponseStyle(ParsingStyle):
    """One choice as items, and as events about them."""

    prompt = "input"
    end = b""

    def __init__(
        self,
        body: ResponseRequest,
        asked: ChatRequest,
        name: str,
        vocabulary: Vocabulary,
        format: AnswerFormat,
        offer: Offer,
    ) -> None:
        super().__init__(asked, name, vocabulary, format, offer)
        self._parses = True
        if self.structured == "response_format" and body.response_format is None:
            self.structured = "text.format"
        self._numbers = itertools.count()
        self._items = _Items(name)
        self._response = answers.Response(
            id=f"resp_{name}",
            created_at=self._named["created"],
            model=self._named["model"],
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata={} if body.metadata in (UNSET, b"null") else body.metadata,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            temperature=body.temperature,
            text={"format": _format(body)},
            tool_choice=body.tool_choice or "auto",
            tools=list(body.tools or ()),
            top_p=body.top_p,
        )
        self._begun = replace(self._response)

    async def whole(self, choices: Sequence[Choice], each: Each) -> answers.Response:
        for part in choices[0].parts:
            self._items.add(part)
        self._finish(choices[0])
        return self._response

    def first(self, choice: Choice) -> list[_Event]:
        return [_event(f"response.{kind}", response=self._begun) for kind in ("created", "in_progress")]

    def events(self, choice: Choice, message: Chunk | Done) -> list[_Event]:
        events = self._items.add(choice.parts[-1])
        if isinstance(message, Done):
            events += self._finish(choice)
            events.append(_event(f"response.{self._response.status}", response=self._response))
        return events

    def last(self, choices: Sequence[Choice]) -> list[_Event]:
        return []

    def error(self, error: HttpError) -> _Event:
        return _event("error", code=error.code, message=error.message, param=error.param)

    def encode(self, event: _Event) -> bytes:
        numbered = {**event, "sequence_number": next(self._numbers)}
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encoder.encode(numbered))

    def _finish(self, choice: Choice) -> list[_Event]:
        """Complete the response, and return the events of its last item."""
        done, response = choice.end, self._response
        response.status = "completed" if done.finish_reason == "stop" else "incomplete"
        if response.status == "incomplete":
            response.incomplete_details = {
                "reason": "max_output_tokens" if done.finish_reason == "length" else done.finish_reason
            }
        events = self._items.close(response.status)
        response.output = self._items.output
        usage = self._usage([choice])
        response.usage = answers.ResponseUsage(
            usage.prompt_tokens,
            answers.PromptDetails(done.metrics.cached_tokens),
            usage.completion_tokens,
            answers.OutputDetails(),
            usage.total_tokens,
        )
        return events


class _Items:
    """The items of an answer as it grows, and the events about them."""

    def __init__(self, name: str) -> None:
        self.output: list[dict[str, Any]] = []
        self._name = name
        self._kind = ""  # of the open item
        self._text: list[str] = []  # of it

    def add(self, part: Answer) -> list[_Event]:
        """Add a part of the answer."""
        events = []
        for piece in part.pieces:
            if isinstance(piece, ToolCall):
                events += self._add_call(piece)
            elif isinstance(piece, Thought):
                events += self._add_text("reasoning", piece.text)
            else:
                events += self._add_text("message", piece)
        return events

    def _add_call(self, call: ToolCall) -> list[_Event]:
        """Add an item that is complete at once."""
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
        """End the open item, if there is one."""
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
        """Add text to the open item of this kind, or to a new one."""
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


async def _response(service: Service, exchange: Exchange) -> None:
    body = await service.read(exchange, ResponseRequest)
    await service.converse(exchange, as_chat(body), ResponseStyle, partial(ResponseStyle, body))


_KINDS = ResponseRequest, answers.Response, answers.Response
ROUTES = [Route("POST", "/v1/responses", _response, "Continue a conversation of items.", *_KINDS)]
