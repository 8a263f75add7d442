"""The items of `/v1/responses` as a chat. Functions raise HttpError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from ssd.frontend.http.asked import log_left_out
from ssd.frontend.http.bodies import (
    AllowedTool,
    AllowedTools,
    CalledFunction,
    ChatRequest,
    ChosenTool,
    Function,
    FunctionName,
    JsonSchema,
    ResponseFormat,
    Said,
    SaidCall,
    Sampling,
    Tool,
)
from ssd.frontend.http.errors import given, invalid, missing
from ssd.frontend.http.exchange import encoder
from ssd.frontend.http.parameters import check_one_choice
from ssd.plugins.responses.bodies import (
    ChosenFunction,
    InputItem,
    ItemPart,
    OfferedTool,
    ResponseRequest,
    TextFormat,
)
from ssd.plugins.responses.store import Item, ResponseStore

_CALLS = ("function_call", "custom_tool_call", "local_shell_call")
_RESULTS = tuple(f"{kind}_output" for kind in _CALLS)
stored = msgspec.json.Decoder(InputItem)


def as_chat(body: ResponseRequest, items: Sequence[InputItem], before: Sequence[InputItem] = ()) -> ChatRequest:
    check_one_choice(body)
    if body.max_output_tokens == 0:
        raise invalid("max_output_tokens", "max_output_tokens must be at least 1, or -1")
    return ChatRequest(
        messages=_messages(body.instructions, items, before),
        max_completion_tokens=body.max_output_tokens,
        tools=[
            Tool("function", Function(tool.name or "", tool.description, tool.parameters, tool.strict))
            for tool in functions(body)
        ],
        tool_choice=_choice(body.tool_choice) if isinstance(body.tool_choice, ChosenFunction) else body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        **{name: getattr(body, name) for name in Sampling.__struct_fields__}
        | {"stream_options": None, **_response_format(body)},
    )


def _choice(asked: ChosenFunction) -> ChosenTool | Literal["none"]:
    if asked.type == "function":
        return ChosenTool("function", FunctionName(given(asked.name, "tool_choice.name")))
    allowed = [AllowedTool(name=tool.name) for tool in asked.tools if tool.type == "function"]
    return ChosenTool("allowed_tools", allowed_tools=AllowedTools(allowed, asked.mode or "auto")) if allowed else "none"


def functions(body: ResponseRequest) -> list[OfferedTool]:
    """Return the functions: this server runs no tools of other types."""
    found = []
    for index, tool in enumerate(body.tools or ()):
        if tool.type == "function":
            given(tool.name, f"tools[{index}].name")
            found.append(tool)
        else:
            log_left_out("tools", tool.type)
    return found


def format_of(body: ResponseRequest) -> TextFormat:
    return (body.text and body.text.format) or TextFormat(type="text")


def _response_format(body: ResponseRequest) -> dict[str, ResponseFormat]:
    format = format_of(body)
    if format.type == "text":
        return {}
    if body.response_format is not None:
        raise invalid("text.format", "text.format and response_format both say what the answer must be; give one")
    if format.type == "json_schema" and format.schema in (UNSET, b"null"):
        raise missing("text.format.schema")
    return {"response_format": ResponseFormat(format.type, JsonSchema(format.schema, strict=format.strict))}


def given_items(body: ResponseRequest, store: ResponseStore, most: int) -> list[InputItem]:
    """Return a request's items, with at most `most` bytes of the store in place of references."""
    if body.input is None:
        raise missing("input")
    items = [InputItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    found = {
        index: store.item(given(item.id, f"input[{index}].id"), f"input[{index}].id")
        for index, item in enumerate(items)
        if _is_reference(item)
    }
    if sum(map(len, found.values())) > most:
        raise invalid("input", f"input refers to more than {most} bytes of items", "body_too_large")
    return [stored.decode(found[index]) if index in found else item for index, item in enumerate(items)]


def _is_reference(item: InputItem) -> bool:
    return item.type == "item_reference" or (item.type is None and item.role is None and item.id is not None)


def _messages(instructions: str | None, items: Sequence[InputItem], before: Sequence[InputItem]) -> list[Said]:
    """Return the conversation, with thoughts, text and calls that follow each other as one message.

    Texts of the system at the beginning are one message, too: many templates take no second one."""
    said = [] if instructions is None else [Said("system", [instructions])]
    thoughts: dict[int, list[str]] = {}  # by the index of their message
    for index, item in enumerate([*before, *items], -len(before)):
        where, kind = f"input[{index}]", item.type or "message"
        if kind in _RESULTS:
            call_id = given(item.call_id, f"{where}.call_id")
            said.append(Said("tool", _text(given(item.output, f"{where}.output")), tool_call_id=call_id))
        elif kind == "message" and item.role != "assistant":
            role = given(item.role, f"{where}.role")
            content, first = _text(given(item.content, f"{where}.content")), said[0].content if said else ""
            if len(said) == 1 and {role, said[0].role} <= {"system", "developer"} and isinstance(first, list):
                first += ["\n\n", content]
            else:
                said.append(Said(role, [content]))
        elif kind in ("message", "reasoning", *_CALLS):
            _add_to_assistant(said, item, kind, where)
            if kind == "reasoning":
                thoughts.setdefault(len(said) - 1, []).append(_text(item.content or ""))
        elif kind == "computer_call_output":
            raise invalid(f"{where}.type", f"{where}.type: images are not supported", "unsupported_parameter")
        else:
            log_left_out("items", kind)
    for index, parts in thoughts.items():
        said[index].reasoning_content = "".join(parts)
    return said


def _add_to_assistant(said: list[Said], item: InputItem, kind: str, where: str) -> None:
    begins = not said or said[-1].role != "assistant" or (kind not in _CALLS and bool(said[-1].tool_calls))
    if begins or (kind == "message" and said[-1].content):
        said.append(Said("assistant", "", []))
    message = said[-1]
    if kind == "message":
        message.content = _text(given(item.content, f"{where}.content"))
    elif kind != "reasoning":
        assert message.tool_calls is not None, "those made here have a list"
        called = _called(item, kind, where)
        message.tool_calls.append(SaidCall(given(item.call_id or item.id, f"{where}.call_id"), called))


def _called(item: InputItem, kind: str, where: str) -> CalledFunction:
    if kind == "local_shell_call":
        if item.action is UNSET:
            raise missing(f"{where}.action")
        return CalledFunction("local_shell", bytes(item.action).decode())
    name = given(item.name, f"{where}.name")
    if kind == "custom_tool_call":
        return CalledFunction(name, encoder.encode({"input": given(item.input, f"{where}.input")}).decode())
    return CalledFunction(name, given(item.arguments, f"{where}.arguments") or "{}")


def kept(body: ResponseRequest, items: Sequence[InputItem], name: str) -> list[Item]:
    """Return the `items` of a request that are part of the conversation as they are kept."""
    asked, found = body.input if isinstance(body.input, list) else items, []
    for index, item in enumerate(items):
        kind, content = item.type or "message", item.content
        if kind in ("message", "reasoning", *_CALLS, *_RESULTS):
            if kind == "message" and isinstance(content, str):
                content = [ItemPart("output_text" if item.role == "assistant" else "input_text", content)]
            own = replace(item, type=kind, id=item.id or f"in_{name}_{index}", content=content)
            is_ours = not item.id or _is_reference(asked[index])
            found.append(Item(str(own.id), encoder.encode(own), is_ours))
    return found


def _text(content: str | list[ItemPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
