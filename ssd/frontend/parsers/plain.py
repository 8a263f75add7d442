"""Puts tools into a conversation as plain text, for chat templates without tools."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from ssd.frontend.parsers.rules import call_prefix
from ssd.ipc.public import CalledTool, ChatMessage

_KEPT = ("name", "description", "parameters")
_INTRODUCTION = "You are a helpful assistant with these functions:"
_HOW = (
    'If a function helps to answer, respond only with JSON: {"name": "function name", "parameters": {"argument": '
    '"value"}}\nSeveral calls have ; between them. If no function is needed, respond in words.'
)


def in_plain_text(
    messages: Sequence[ChatMessage], tools: Sequence[Any], as_text: Callable[[str], str], has_system: bool
) -> list[ChatMessage]:
    """Return the conversation with its tools, in OpenAI's format, calls and results as text of messages.

    `as_text` rewrites JSON so that no special token is spelled in it. Without `has_system` the tools are in the user's
    first message."""
    told: list[ChatMessage] = []
    for before, said in zip([None, *messages], messages, strict=False):
        if said.role == "tool":
            named = f" of {as_text(json.dumps(said.name, ensure_ascii=False))}" if said.name else ""
            plain = ChatMessage("user", f"Result{named}:\n{said.content}")
        else:
            calls = "; ".join(as_text(_call(call)) for call in said.tool_calls)
            plain = replace(said, content="\n".join(filter(None, [said.content, calls])), tool_calls=[])
        if before and "tool" in (before.role, said.role) and plain.role == told[-1].role:
            # Many templates require that roles alternate.
            told[-1] = replace(told[-1], content=f"{told[-1].content}\n\n{plain.content}")
        else:
            told.append(plain)
    if not tools:
        return told
    offer = "\n".join([_INTRODUCTION, *(json.dumps(_function(tool), ensure_ascii=False) for tool in tools), _HOW])
    return _with_first(told, as_text(offer), "system" if has_system else "user")


def _call(call: CalledTool) -> str:
    """Return a call as the model wrote it, so that the prompt begins like the previous one."""
    return f"{call_prefix(call.name, 'parameters')}{call.arguments or '{}'}}}"


def _function(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    return {key: function[key] for key in _KEPT if key in function} if isinstance(function, dict) else tool


def _with_first(messages: Sequence[ChatMessage], text: str, role: str) -> list[ChatMessage]:
    found = next((index for index, said in enumerate(messages) if said.role == role), None)
    if found is None:
        return [ChatMessage(role, text), *messages]  # type: ignore[arg-type]
    said = messages[found]
    return [*messages[:found], replace(said, content=f"{text}\n\n{said.content}"), *messages[found + 1 :]]
