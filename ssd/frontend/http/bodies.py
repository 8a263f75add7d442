"""The JSON that HTTP clients send, by the names of the OpenAI API and of vLLM. Unknown fields are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ssd.config.params import MAX_LOOKAHEAD, Seed, TokenId
from ssd.ipc.public import MAX_PROMPT_TOKENS, MAX_TEXT, PromptIds

Unsupported = Annotated[None, Meta(description="Not supported; may be null.")]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
_Stop = Annotated[str, Meta(min_length=1, max_length=256)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Probability = Annotated[float, Meta(ge=0, le=1)]
_Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
# A list is one prompt of token ids, or a list of prompts.
_Prompts = Annotated[list[Text | TokenId | PromptIds], Meta(max_length=MAX_PROMPT_TOKENS)]
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "maxItems": MAX_PROMPT_TOKENS}
_PROMPT = {"oneOf": [{"type": "string"}, _TEXTS, _IDS, {"type": "array", "items": _IDS, "minItems": 1}]}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`include_usage` adds a last event with the usage."""

    include_usage: bool | None = None


class Speculative(msgspec.Struct, forbid_unknown_fields=True):
    """Whether and how far this request is speculated on. It changes speed only."""

    enabled: bool = True
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=MAX_LOOKAHEAD)] | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """Only plain text is supported."""

    type: Literal["text"]


class Sampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that chats and raw completions have in common."""

    model: Annotated[str, Meta(max_length=256)]
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=4)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None = None
    seed: Seed | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None
    # beyond OpenAI's, by vLLM's names
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: _Probability | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    # our own
    speculative: Speculative | None = None
    return_metrics: bool | None = None
    response_format: ResponseFormat | None = None


class CompletionRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    """`/v1/completions`. `prompt` is a text, token ids, or a list of either."""

    prompt: Annotated[Text | _Prompts, Meta(extra_json_schema=_PROMPT)]
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=1)] | None = None
    suffix: Unsupported = None


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: Text


class Said(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Meta(max_length=1024)]
    name: Unsupported = None
    refusal: Unsupported = None
    tool_calls: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None


class ChatRequest(Sampling, kw_only=True, forbid_unknown_fields=True):
    """`/v1/chat/completions`."""

    messages: Annotated[list[Said], Meta(min_length=1, max_length=1024)]
    max_completion_tokens: _Tokens | None = None
    max_tokens: _Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Unsupported = None
    tool_choice: Unsupported = None
    parallel_tool_calls: Unsupported = None
    functions: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    modalities: Unsupported = None
    prediction: Unsupported = None
    reasoning_effort: Unsupported = None
    web_search_options: Unsupported = None
    metadata: Unsupported = None
    store: Unsupported = None
    service_tier: Unsupported = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`/tokenize`: a text, or a conversation in the model's chat format."""

    model: Annotated[str, Meta(max_length=256)] | None = None
    prompt: Text | None = None
    messages: Annotated[list[Said], Meta(min_length=1, max_length=1024)] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`/detokenize`."""

    model: Annotated[str, Meta(max_length=256)] | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)]
