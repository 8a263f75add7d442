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
    ignored,
    unsupported,
)


class ItemPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "text"]
    text: Text
    annotations: Annotated[Anything, ignored("they are about a text, and no part of it")] = UNSET
    logprobs: Annotated[Anything, ignored("they are about a text, and no part of it")] = UNSET


_ItemText = Text | Annotated[list[ItemPart], Meta(max_length=1024)] | None

_left_out = ignored("a tool of this type is left out")
_items_left_out = ignored("an item of this type is left out")


class InputItem(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
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
    status: Annotated[Anything, ignored("an unfinished item is an item")] = UNSET
    phase: Annotated[Anything, ignored("chat templates know roles only")] = UNSET
    summary: Annotated[Anything, ignored("the thoughts are in content")] = UNSET
    encrypted_content: Annotated[Anything, ignored("the thoughts are in content")] = UNSET
    namespace: Annotated[Anything, ignored("a tool has one name")] = UNSET
    result: Annotated[Anything, _items_left_out] = UNSET
    results: Annotated[Anything, _items_left_out] = UNSET
    queries: Annotated[Anything, _items_left_out] = UNSET
    tools: Annotated[Anything, _items_left_out] = UNSET


class OfferedTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function, as in a chat. A tool of any other type is left out."""

    type: Name
    name: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    description: Text | None = None
    parameters: dict[str, msgspec.Raw] | None = None
    strict: Annotated[bool | None, Meta(description="Arguments obey all of `parameters`, or are refused.")] = None
    defer_loading: Annotated[Anything, ignored("the model is told of every tool")] = UNSET
    format: Annotated[Anything, _left_out] = UNSET
    tools: Annotated[Anything, _left_out] = UNSET
    execution: Annotated[Anything, _left_out] = UNSET
    output_format: Annotated[Anything, _left_out] = UNSET
    external_web_access: Annotated[Anything, _left_out] = UNSET
    search_context_size: Annotated[Anything, _left_out] = UNSET
    search_content_types: Annotated[Anything, _left_out] = UNSET
    user_location: Annotated[Anything, _left_out] = UNSET
    filters: Annotated[Anything, _left_out] = UNSET


class ChosenFunction(msgspec.Struct, forbid_unknown_fields=True):
    """The function to call."""

    type: Literal["function", "allowed_tools"]
    name: Name | None = None
    mode: Annotated[Literal["auto", "required"] | None, Meta(description="Of allowed_tools.")] = None
    tools: Annotated[list[OfferedTool], Meta(max_length=1024, description="Of allowed_tools: their names.")] = []


class TextFormat(JsonSchema, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A `json_schema` has a `schema`, which is obeyed, `strict` or not."""

    type: Literal["text", "json_object", "json_schema"]


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Annotated[Anything, ignored("the model has no such setting")] = UNSET


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    effort: Effort | None = None
    summary: Annotated[Anything, ignored("the thoughts are in content")] = UNSET
    generate_summary: Annotated[Anything, ignored("the thoughts are in content")] = UNSET
    context: Annotated[Anything, ignored("the chat template decides which thoughts stay")] = UNSET


class ResponseRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
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
    include: Annotated[Anything, ignored("answers have all that there is")] = UNSET
    max_tool_calls: Annotated[Anything, ignored("it is about tools of the server, and there are none")] = UNSET
    client_metadata: Annotated[Anything, ignored("nothing is kept about clients")] = UNSET
    personality: Annotated[Anything, ignored("the model has no such setting")] = UNSET
    text: TextOptions | None = None
    conversation: Annotated[Anything, unsupported()] = UNSET
    background: Annotated[Anything, unsupported(False)] = UNSET
    truncation: Annotated[Anything, unsupported("disabled")] = UNSET
    prompt: Annotated[Anything, unsupported()] = UNSET
    top_logprobs: Annotated[Anything, unsupported(0)] = UNSET
