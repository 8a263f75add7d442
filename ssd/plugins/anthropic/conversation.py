"""The messages of `/v1/messages` as a chat. Functions raise HttpError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET, Raw

from ssd.config.params import MAX_STOPS
from ssd.frontend.http.asked import log_left_out
from ssd.frontend.http.bodies import (
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
from ssd.plugins.anthropic.bodies import MessageBlock, MessageRequest, OutputConfig, TextBlock, ToolChoice

CALL = "toolu_"
"""Begins the id of a call."""
_BILLING = "x-anthropic-billing-header:"  # begins a block of Claude Code that changes with every request
_SAYS = {
    "system": {"text"},
    "user": {"text", "tool_result"},
    "assistant": {"text", "tool_use", "thinking", "redacted_thinking"},
}
_EFFORTS = {"xhigh": "high", "max": "high"}  # chat templates know low, medium and high


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
    changed = {"stop": stop, "stream_options": None, **_format(body, output)}
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
    return name.removeprefix(CALL)
