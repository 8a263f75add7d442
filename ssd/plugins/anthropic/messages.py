"""`/v1/messages` and `/v1/messages/count_tokens`, as chats. Functions raise HttpError."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Raw

from ssd.config.engine import ServerConfig
from ssd.config.params import MAX_STOPS
from ssd.frontend.detokenization import Vocabulary
from ssd.frontend.http.asked import AskedAnswer, log_left_out, new_id
from ssd.frontend.http.bodies import (
    Anything,
    CalledFunction,
    ChatRequest,
    ChosenTool,
    Effort,
    Function,
    FunctionName,
    JsonSchema,
    Name,
    ResponseFormat,
    Said,
    SaidCall,
    Sampling,
    Stop,
    Text,
    Tokens,
    Tool,
    ToolName,
    Variables,
    ignored,
    unsupported,
)
from ssd.frontend.http.errors import HttpError, given, invalid, missing
from ssd.frontend.http.exchange import Exchange, encoder
from ssd.frontend.http.openapi import Route
from ssd.frontend.http.parameters import check_one_choice
from ssd.frontend.http.service import Service
from ssd.frontend.http.style import Choice, Each, GrowingAnswer, ParsingStyle
from ssd.frontend.parsers.answer import AnswerFormat
from ssd.frontend.parsers.tools import ToolCall
from ssd.ipc.public import Chunk, Done

_Event: TypeAlias = dict[str, Any]
_ALIASES = "claude-"  # names that begin so stand for the served model
_BILLING = "x-anthropic-billing-header:"  # begins a block of Claude Code that changes with every request
_CALL = "toolu_"
_REQUEST_ID = b"request-id"  # a header that Anthropic's SDKs read
_SIGNATURE = "unsigned"  # clients want some signature of thoughts
_SAYS = {
    "system": {"text"},
    "user": {"text", "tool_result"},
    "assistant": {"text", "tool_use", "thinking", "redacted_thinking"},
}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "abort": "max_tokens"}
_EFFORTS = {"xhigh": "high", "max": "high"}  # chat templates know low, medium and high
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_cached = ignored("every prompt is looked for in the prefix cache")
_about = ignored("it is about a text, and no part of it")
_our_tools = ignored("the server runs no tools")


class TextBlock(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: Text
    cache_control: Annotated[Anything, _cached] = UNSET
    citations: Annotated[Anything, _about] = UNSET


_Texts = Text | Annotated[list[TextBlock], Meta(max_length=1024)]


class MessageBlock(msgspec.Struct, forbid_unknown_fields=True):
    """One block of a message: text, a call of a tool, what it returned, or thoughts."""

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: Text | None = None
    thinking: Text | None = None
    id: Name | None = None
    name: Name | None = None
    input: dict[str, Raw] | None = None
    tool_use_id: Name | None = None
    content: _Texts | None = None
    is_error: bool | None = None
    cache_control: Annotated[Anything, _cached] = UNSET
    citations: Annotated[Anything, _about] = UNSET
    signature: Annotated[Anything, ignored("thoughts are not signed")] = UNSET
    data: Annotated[Anything, ignored("nobody can read it here")] = UNSET
    caller: Annotated[Anything, _our_tools] = UNSET
    toolset_name: Annotated[Anything, _our_tools] = UNSET


class MessageTurn(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[MessageBlock], Meta(max_length=1024)]


class MessageTool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool of the client; one with another type than `custom` is left out."""

    name: ToolName
    type: Name | None = None
    description: Text | None = None
    input_schema: dict[str, Raw] | None = None
    strict: bool | None = None
    cache_control: Annotated[Anything, _cached] = UNSET
    input_examples: Annotated[Anything, ignored("chat templates know a tool's schema only")] = UNSET
    defer_loading: Annotated[Anything, ignored("the prompt has all tools")] = UNSET
    eager_input_streaming: Annotated[Anything, ignored("a call is sent when it is complete")] = UNSET
    allowed_callers: Annotated[Anything, _our_tools] = UNSET
    max_uses: Annotated[Anything, _our_tools] = UNSET
    allowed_domains: Annotated[Anything, _our_tools] = UNSET
    blocked_domains: Annotated[Anything, _our_tools] = UNSET
    user_location: Annotated[Anything, _our_tools] = UNSET


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: Annotated[bool, Meta(description="If true, there is one call at most.")] | None = None


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """Sets the chat template's variable `enable_thinking`, if it has one."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[Anything, ignored("chat templates know no budget")] = UNSET
    display: Annotated[Anything, ignored("all thoughts are shown")] = UNSET


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: Anything = UNSET
    name: Annotated[Anything, ignored("the prompt says what the model is told")] = UNSET


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: OutputFormat | None = None
    effort: Effort | None = None
    task_budget: Annotated[Anything, ignored("chat templates know no budget")] = UNSET


class MessageRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    """`/v1/messages` and `/v1/messages/count_tokens`."""

    messages: Annotated[list[MessageTurn], Meta(min_length=1, max_length=1024)]
    system: _Texts | None = None
    max_tokens: Tokens | None = None
    stop_sequences: Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    tools: Annotated[list[MessageTool], Meta(max_length=1024)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[OutputFormat | None, Meta(description="The older name of output_config.format.")] = None
    chat_template_kwargs: Variables | None = None
    cache_control: Annotated[Anything, _cached] = UNSET
    betas: Annotated[Anything, ignored("what works needs no beta")] = UNSET
    context_management: Annotated[Anything, ignored("the prompt has the whole conversation")] = UNSET
    diagnostics: Annotated[Anything, ignored("no answer is stored")] = UNSET
    inference_geo: Annotated[Anything, ignored("there is one place")] = UNSET
    speed: Annotated[Anything, ignored("there is one")] = UNSET
    container: Annotated[Anything, unsupported()] = UNSET
    mcp_servers: Annotated[Anything, unsupported([])] = UNSET

    def __post_init__(self) -> None:
        self.model = without_alias(self.model)


def without_alias(name: str | None) -> str | None:
    """Return the name of a model, or None for the served one, which Anthropic's names stand for."""
    return None if (name or "").startswith(_ALIASES) else name


# -- messages to a chat ---------------------------------------------------------------------------------------------


def as_chat(body: MessageRequest, takes_thinking: bool) -> ChatRequest:
    """Return the chat that a request asks for; without being asked a model does not think."""
    check_one_choice(body)
    messages = _messages(body)
    output = body.output_config or OutputConfig()
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    variables = {"enable_thinking": Raw(encoder.encode(thinks))} if takes_thinking else {}
    stop = [*(body.stop_sequences or ()), *([body.stop] if isinstance(body.stop, str) else body.stop or ())]
    if len(stop) > MAX_STOPS:
        raise invalid("stop_sequences", f"stop_sequences and stop have {len(stop)} texts; at most {MAX_STOPS} end one")
    changed = {"stop": stop, **_format(body, output)}
    return ChatRequest(
        messages=messages,
        max_tokens=body.max_tokens,
        tools=_tools(body),
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=False if body.tool_choice and body.tool_choice.disable_parallel_tool_use else None,
        chat_template_kwargs={**variables, **(body.chat_template_kwargs or {})},
        continue_final_message=messages[-1].role == "assistant" and bool(messages[-1].content),
        reasoning_effort=_EFFORTS.get(output.effort or "", output.effort),
        **{name: getattr(body, name) for name in Sampling.__struct_fields__} | changed,
    )


def _format(body: MessageRequest, output: OutputConfig) -> dict[str, ResponseFormat]:
    format = output.format or body.output_format
    if format is None:
        return {}
    if body.response_format is not None:
        raise invalid("response_format", "output_config.format and response_format contradict each other; give one")
    if format.schema in (UNSET, b"null"):
        raise missing("output_config.format.schema")
    return {"response_format": ResponseFormat("json_schema", JsonSchema(format.schema))}


def _tools(body: MessageRequest) -> list[Tool]:
    kept = []
    for tool in body.tools or ():
        if tool.type in (None, "custom"):
            kept.append(Tool("function", Function(tool.name, tool.description, tool.input_schema, tool.strict)))
        else:
            log_left_out("tools", tool.type)
    return kept


def _choice(asked: ToolChoice | None) -> Literal["none", "auto", "any"] | ChosenTool | None:
    if asked is None:
        return None
    if asked.type == "tool":
        return ChosenTool("function", FunctionName(given(asked.name, "tool_choice.name")))
    return asked.type


def _messages(body: MessageRequest) -> list[Said]:
    """Return the conversation, with neighbouring turns of one role as one message.

    Many chat templates want a system message first only: after an answer its text is the user's."""
    said: list[Said] = []
    thoughts: dict[int, list[str]] = {}  # by the index of their message
    system = [] if body.system is None else [_joined(body.system)]
    for index, turn in enumerate(body.messages):
        where = f"messages[{index}].content"
        blocks = [MessageBlock("text", turn.content)] if isinstance(turn.content, str) else turn.content
        for number, block in enumerate(blocks):
            if block.type not in _SAYS[turn.role]:
                at = f"{where}[{number}].type"
                raise invalid(at, f"{at}: a message of the role {turn.role} has no block {block.type}")
        if turn.role == "assistant":
            _add_to_assistant(said, thoughts, blocks, where)
        elif turn.role == "system" and all(one.role != "assistant" for one in said):
            system += [given(block.text, f"{where}.text") for block in blocks]
        else:
            _add_told(said, blocks, where)
    for index, parts in thoughts.items():
        said[index].reasoning_content = "".join(parts)
    if not system and not said:
        raise invalid("messages", "messages: no message says anything")
    return [Said("system", "\n".join(system)), *said] if system else said


def _add_to_assistant(
    said: list[Said], thoughts: dict[int, list[str]], blocks: Sequence[MessageBlock], where: str
) -> None:
    if not said or said[-1].role != "assistant":
        said.append(Said("assistant", [], []))
    texts, calls = said[-1].content, said[-1].tool_calls
    assert isinstance(texts, list) and calls is not None, "those made here have lists"
    for number, block in enumerate(blocks):
        at = f"{where}[{number}]"
        if block.type == "text":
            texts += filter(None, [given(block.text, f"{at}.text")])
        elif block.type == "thinking":
            thoughts.setdefault(len(said) - 1, []).append(given(block.thinking, f"{at}.thinking"))
        elif block.type == "tool_use":
            function = CalledFunction(given(block.name, f"{at}.name"), block.input)
            calls.append(SaidCall(_call_id(given(block.id, f"{at}.id")), function))


def _add_told(said: list[Said], blocks: Sequence[MessageBlock], where: str) -> None:
    """Add what tools have returned, each as a message, then the other blocks to the user's text."""
    texts = []
    for number, block in enumerate(blocks):
        at = f"{where}[{number}]"
        if block.type == "text":
            texts.append(given(block.text, f"{at}.text"))
            continue
        text = _joined(block.content or "")
        call_id = _call_id(given(block.tool_use_id, f"{at}.tool_use_id"))
        said.append(Said("tool", f"Error: {text}" if block.is_error else text, tool_call_id=call_id))
    if not texts and blocks:
        return
    if said and said[-1].role == "user":
        told = said[-1].content
        assert isinstance(told, list), "those made here have lists"
        told += ["\n", "\n".join(texts)]
    else:
        said.append(Said("user", ["\n".join(texts)]))


def _joined(content: str | list[TextBlock]) -> str:
    """Return texts as one, without Claude Code's block that would spoil the prefix cache."""
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content if not block.text.startswith(_BILLING))


def _call_id(name: str) -> str:
    """Return a call's name without the prefix: some chat templates want a certain length."""
    return name.removeprefix(_CALL)


# -- answers --------------------------------------------------------------------------------------------------------


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


class ModelInfo(msgspec.Struct):
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    type: Literal["model"] = "model"
    lifecycle: Literal["active"] = "active"


class ModelInfos(msgspec.Struct):
    data: list[ModelInfo]
    first_id: str
    last_id: str
    has_more: bool = False


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

    def __init__(
        self,
        body: MessageRequest,
        asked: ChatRequest,
        name: str,
        vocabulary: Vocabulary,
        format: AnswerFormat,
        answer: AskedAnswer,
    ) -> None:
        super().__init__(asked, name, vocabulary, format, answer)
        self._parses = True
        if self.form.field == "response_format" and body.response_format is None:
            self.form = self.form._replace(field="output_config.format")
        self._name = name.removeprefix(self.prefix)
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

    def last(self, choices: Sequence[Choice]) -> list[_Event]:
        return []

    def error(self, error: HttpError) -> MessageError:
        return error_object(error, self._name)

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
        block = {"type": "tool_use", "id": f"{_CALL}{new_id()}", "name": call.name, "input": {}}
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


def model_info(service: Service, name: str) -> ModelInfo:
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(service.created))
    return ModelInfo(name, name, created, service.manager.config.max_model_len)


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
    await exchange.reply_json(ModelInfos(found, names[0], names[-1]))


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
