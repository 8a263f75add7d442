"""The JSON that clients of `/v1/responses` send; see `ssd.frontend.http.bodies`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta

from ssd.frontend.http.bodies import (
    Anything,
    Effort,
    JsonSchema,
    Name,
    Sampling,
    Text,
    Tokens,
    Variables,
    unsupported,
)

_shown = Meta(description="For `input_items` only.")


class ItemPart(msgspec.Struct):
    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "text"]
    text: Text
    annotations: Annotated[Anything, _shown] = UNSET
    logprobs: Annotated[Anything, _shown] = UNSET


_ItemText = Text | Annotated[list[ItemPart], Meta(max_length=1024)] | None


class InputItem(msgspec.Struct, omit_defaults=True):
    """One item of a conversation: a message, a call of a tool, what it returned, thoughts, or the `id` of a kept item.

    Items of other types, those of tools of a server, are left out."""

    type: Name | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: _ItemText = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: Text | None = None
    input: Text | None = None
    action: Annotated[Anything, Meta(description="The arguments of a local_shell_call.")] = UNSET
    output: _ItemText = None
    id: Name | None = None
    status: Annotated[Anything, _shown] = UNSET
    phase: Annotated[Anything, _shown] = UNSET
    summary: Annotated[Anything, _shown] = UNSET
    encrypted_content: Annotated[Anything, _shown] = UNSET
    namespace: Annotated[Anything, _shown] = UNSET


class OfferedTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A function, as in a chat. A tool of any other type is left out."""

    type: Name
    name: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    description: Text | None = None
    parameters: dict[str, msgspec.Raw] | None = None
    strict: Annotated[bool | None, Meta(description="Arguments obey all of `parameters`, or are refused.")] = None


class ChosenFunction(msgspec.Struct):
    """The function to call."""

    type: Literal["function", "allowed_tools"]
    name: Name | None = None
    mode: Annotated[Literal["auto", "required"] | None, Meta(description="Of allowed_tools.")] = None
    tools: Annotated[list[OfferedTool], Meta(max_length=1024, description="Of allowed_tools: their names.")] = []


class TextFormat(JsonSchema, kw_only=True, omit_defaults=True):
    """A `json_schema` has a `schema`, which is obeyed, `strict` or not."""

    type: Literal["text", "json_object", "json_schema"]


class TextOptions(msgspec.Struct):
    format: TextFormat | None = None


class Reasoning(msgspec.Struct):
    effort: Effort | None = None


class ResponseRequest(Sampling, kw_only=True):
    """`/v1/responses`, whose `input` is a text of the user, or items.

    They continue the conversation of `previous_response_id`, if it is given."""

    input: Text | Annotated[list[InputItem], Meta(min_length=1, max_length=4096)] | None = None
    previous_response_id: Name | None = None
    store: (
        Annotated[bool, Meta(description="False: neither this response nor, for guesses, its text is kept.")] | None
    ) = None
    metadata: Annotated[Anything, Meta(description="Kept with the response.")] = UNSET
    instructions: Text | None = None
    max_output_tokens: Tokens | None = None
    tools: Annotated[list[OfferedTool], Meta(max_length=1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: Annotated[bool, Meta(description="If false, there is one call at most.")] | None = None
    chat_template_kwargs: Variables | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    conversation: Annotated[Anything, unsupported()] = UNSET
    background: Annotated[Anything, unsupported(False)] = UNSET
    truncation: Annotated[Anything, unsupported("disabled")] = UNSET
    prompt: Annotated[Anything, unsupported()] = UNSET
    top_logprobs: Annotated[Anything, unsupported(0)] = UNSET
