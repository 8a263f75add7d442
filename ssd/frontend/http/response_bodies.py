"""The JSON that clients of `/v1/responses` send: see `ssd.frontend.http.bodies`, whose marks its fields have."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta

from ssd.frontend.http.bodies import (
    Anything,
    Function,
    JsonSchema,
    Sampling,
    Text,
    _Effort,
    _ignored,
    _Name,
    _Tokens,
    _unsupported,
    _Variables,
)


class ItemPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "text"]
    text: Text
    annotations: Annotated[Anything, _ignored("they are about a text, and no part of it")] = UNSET
    logprobs: Annotated[Anything, _ignored("they are about a text, and no part of it")] = UNSET


_ItemText = Text | Annotated[list[ItemPart], Meta(max_length=1024)] | None


class InputItem(msgspec.Struct, forbid_unknown_fields=True):
    """One item of a conversation: a message, a call of a tool, what it returned, or thoughts."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: _ItemText = None
    call_id: _Name | None = None
    name: _Name | None = None
    arguments: Text | None = None
    output: _ItemText = None
    id: Annotated[Anything, _ignored("no answer is stored")] = UNSET
    status: Annotated[Anything, _ignored("an unfinished item is an item")] = UNSET
    phase: Annotated[Anything, _ignored("chat templates know roles only")] = UNSET
    summary: Annotated[Anything, _ignored("the thoughts are in content")] = UNSET
    encrypted_content: Annotated[Anything, _ignored("the thoughts are in content")] = UNSET


class FunctionTool(Function, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    type: Literal["function"]


class ChosenFunction(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    name: _Name


class TextFormat(JsonSchema, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A `json_schema` has a `schema`, which is obeyed, `strict` or not."""

    type: Literal["text", "json_object", "json_schema"]


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Annotated[Anything, _ignored("the model has no such setting")] = UNSET


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    effort: _Effort | None = None
    summary: Annotated[Anything, _ignored("the thoughts are in content")] = UNSET
    generate_summary: Annotated[Anything, _ignored("the thoughts are in content")] = UNSET


class ResponseRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    """`/v1/responses`, whose `input` is a text of the user, or the whole conversation: nothing is stored."""

    input: Text | Annotated[list[InputItem], Meta(min_length=1, max_length=1024)]
    instructions: Text | None = None
    max_output_tokens: _Tokens | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: Annotated[bool, Meta(description="If false, there is one call at most.")] | None = None
    chat_template_kwargs: _Variables | None = None
    reasoning: Reasoning | None = None
    include: Annotated[Anything, _ignored("answers have all that there is")] = UNSET
    max_tool_calls: Annotated[Anything, _ignored("it is about tools of the server, and there are none")] = UNSET
    text: TextOptions | None = None
    previous_response_id: Annotated[Anything, _unsupported()] = UNSET
    conversation: Annotated[Anything, _unsupported()] = UNSET
    background: Annotated[Anything, _unsupported(False)] = UNSET
    truncation: Annotated[Anything, _unsupported("disabled")] = UNSET
    prompt: Annotated[Anything, _unsupported()] = UNSET
    top_logprobs: Annotated[Anything, _unsupported(0)] = UNSET
