"""The JSON that clients of `/v1/messages` send; see `ssd.frontend.http.bodies`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw

from ssd.config.params import MAX_STOPS
from ssd.frontend.http.bodies import (
    Anything,
    Effort,
    Name,
    Sampling,
    Stop,
    Text,
    Tokens,
    ToolName,
    Variables,
    unsupported,
)

_ALIASES = "claude-"  # names that begin so stand for the served model


class TextBlock(msgspec.Struct):
    type: Literal["text"]
    text: Text


Texts = Text | Annotated[list[TextBlock], Meta(max_length=1024)]


class MessageBlock(msgspec.Struct):
    """One block of a message: text, a call of a tool, what it returned, or thoughts."""

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: Text | None = None
    thinking: Text | None = None
    id: Name | None = None
    name: Name | None = None
    input: dict[str, Raw] | None = None
    tool_use_id: Name | None = None
    content: Texts | None = None
    is_error: bool | None = None


class MessageTurn(msgspec.Struct):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[MessageBlock], Meta(max_length=1024)]


class MessageTool(msgspec.Struct):
    """A tool of the client; one with another type than `custom` is left out."""

    name: ToolName
    type: Name | None = None
    description: Text | None = None
    input_schema: dict[str, Raw] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: Annotated[bool, Meta(description="If true, there is one call at most.")] | None = None


class Thinking(msgspec.Struct):
    """Sets the chat template's variable `enable_thinking`, if it has one."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]


class OutputFormat(msgspec.Struct):
    type: Literal["json_schema"]
    schema: Anything = UNSET


class OutputConfig(msgspec.Struct):
    format: OutputFormat | None = None
    effort: Effort | None = None


class MessageRequest(Sampling, kw_only=True):
    """`/v1/messages` and `/v1/messages/count_tokens`."""

    messages: Annotated[list[MessageTurn], Meta(min_length=1, max_length=1024)]
    system: Texts | None = None
    max_tokens: Tokens | None = None
    stop_sequences: Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    tools: Annotated[list[MessageTool], Meta(max_length=1024)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[OutputFormat | None, Meta(description="The older name of output_config.format.")] = None
    chat_template_kwargs: Variables | None = None
    container: Annotated[Anything, unsupported()] = UNSET
    mcp_servers: Annotated[Anything, unsupported([])] = UNSET

    def __post_init__(self) -> None:
        self.model = without_alias(self.model)


def without_alias(name: str | None) -> str | None:
    """Return the name of a model, or None for the served one, which Anthropic's names stand for."""
    return None if (name or "").startswith(_ALIASES) else name
