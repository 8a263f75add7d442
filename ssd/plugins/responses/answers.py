"""The JSON that clients of `/v1/responses` get."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ssd.frontend.http.answers import PromptDetails


class OutputDetails(msgspec.Struct):
    """Thoughts are not counted apart."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: PromptDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Response(msgspec.Struct, kw_only=True):
    """An answer of `/v1/responses`.

    Items of `output` have the types `reasoning`, `message` and `function_call`. `store`: it is kept for later requests,
    or in a stream's first events, it will be if it fits."""

    id: str
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "cancelled"] = "in_progress"
    output: list[dict[str, Any]] = []
    usage: ResponseUsage | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: Any = {}
    parallel_tool_calls: bool = True
    temperature: float | None = None
    tool_choice: Any = "auto"
    tools: list[Any] = []
    top_p: float | None = None
    object: Literal["response"] = "response"
    background: bool = False
    error: None = None
    previous_response_id: str | None = None
    store: bool = False
    truncation: Literal["disabled"] = "disabled"
    text: Any


class InputItems(msgspec.Struct):
    """A page of the conversation that a response has answered."""

    data: list[Any]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class InputTokens(msgspec.Struct):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class DeletedResponse(msgspec.Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True
