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
    ignored,
    unsupported,
)

_ALIASES = "claude-"  # names that begin so stand for the served model
_cached = ignored("every prompt is looked for in the prefix cache")
_about = ignored("it is about a text, and no part of it")
_our_tools = ignored("the server runs no tools")


class TextBlock(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: Text
    cache_control: Annotated[Anything, _cached] = UNSET
    citations: Annotated[Anything, _about] = UNSET


Texts = Text | Annotated[list[TextBlock], Meta(max_length=1024)]


class MessageBlock(msgspec.Struct, forbid_unknown_fields=True):
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
    system: Texts | None = None
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
