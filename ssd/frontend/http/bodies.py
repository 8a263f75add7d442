"""The JSON that HTTP clients send, by the names of the OpenAI API, of vLLM and of llama.cpp.

Every known field stands here: what it does, or the values with which it asks for nothing (`unsupported`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ssd.config.params import MAX_GRAMMAR, MAX_LOOKAHEAD, MAX_STOPS, TokenId
from ssd.ipc.public import MAX_CALLS, MAX_PROMPT_TOKENS, MAX_TEXT, PromptIds
from ssd.law import MAX_SEED

Anything: TypeAlias = msgspec.Raw | UnsetType
"""A field whose value is not looked into, so that it costs no memory."""
NEUTRAL = "neutral"
"""In the metadata of a field that is not supported: the values that ask for nothing, null always among them."""


def unsupported(*neutral: Any) -> Meta:
    """Mark a field that would change the answer and does not work, but for these values and null."""
    # `typing` takes annotations that are equal for one, and 0 is equal to False.
    extra = {NEUTRAL: neutral, "types": [type(value).__name__ for value in neutral]}
    return Meta(description="Not supported.", extra=extra, extra_json_schema={"enum": [None, *neutral]})


Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Stop = Annotated[str, Meta(min_length=1, max_length=256)]
Name = Annotated[str, Meta(max_length=256)]
ToolName = Annotated[str, Meta(min_length=1, max_length=256)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_Probability = Annotated[float, Meta(ge=0, le=1)]
_Source = Annotated[str, Meta(max_length=MAX_GRAMMAR)]
_Choices = Annotated[list[str], Meta(min_length=1, max_length=4096)]
Tokens = Annotated[int, Meta(ge=-1, le=2**31 - 1, description="-1 is as many as the context holds.")]
_Repetition = Annotated[float, Meta(gt=0, le=100)]
Variables = Annotated[dict[str, msgspec.Raw], Meta(max_length=64)]
Effort = Annotated[str, Meta(max_length=64, description="A variable of the chat template, if it knows one.")]
Alternatives = Annotated[int, Meta(ge=0, le=20)]
# A list is one prompt of token ids, or a list of prompts.
Prompts = Annotated[list[Text | TokenId | PromptIds], Meta(max_length=MAX_PROMPT_TOKENS)]
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "maxItems": MAX_PROMPT_TOKENS}
PROMPT = {"oneOf": [{"type": "string"}, _TEXTS, _IDS, {"type": "array", "items": _IDS, "minItems": 1}]}

OTHER_VALUES = frozenset(
    {
        *("function", "image_url", "input_audio", "input_image", "input_file", "video_url", "file", "refusal"),
        *("custom", "allowed_tools", "web_search", "web_search_preview", "file_search", "code_interpreter", "mcp"),
        *("image_generation", "computer_use_preview", "local_shell", "item_reference", "custom_tool_call"),
        *("image", "document", "search_result", "server_tool_use", "tool_reference", "container_upload"),
        *("structural_tag", "custom_tool_call_output", "web_search_call", "file_search_call", "mcp_call", "compaction"),
    }
)
"""Roles, kinds of content, of items, of tools and of formats that other engines have and this one has not."""


class StreamOptions(msgspec.Struct):
    """The events that have usage.

    `include_usage` adds a last event with it, `continuous_usage_stats` the usage so far to every event."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Speculative(msgspec.Struct):
    """Turns speculation off for this request, or limits it, which changes speed only."""

    enabled: bool = True
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=MAX_LOOKAHEAD)] | None = None


class JsonSchema(msgspec.Struct):
    """OpenAI's wrapper of a schema. If it is not `strict`, keywords that no grammar can hold are left out."""

    schema: Anything = UNSET
    name: Name | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """The format of the answer, as OpenAI asks for it.

    `schema` belongs to `json_object`, as in llama.cpp, and may stand for `json_schema`; `structures` and `triggers`
    belong to `structural_tag`. A `regex` has its `pattern`, a `grammar` its `grammar`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    schema: Anything = UNSET
    pattern: _Source | None = None
    grammar: _Source | None = None
    structures: Anything = UNSET
    triggers: Anything = UNSET
    format: Annotated[Anything, unsupported()] = UNSET


class StructuredOutputs(msgspec.Struct):
    """The format of the answer, as vLLM asks for it: one of the first six.

    `json` and `structural_tag` are objects, or texts that hold one."""

    json: Anything = UNSET
    json_object: bool | None = None
    regex: _Source | None = None
    choice: _Choices | None = None
    grammar: _Source | None = None
    structural_tag: Anything = UNSET
    whitespace_pattern: Annotated[Anything, unsupported()] = UNSET
    disable_any_whitespace: Annotated[Anything, unsupported(False)] = UNSET


class Sampling(msgspec.Struct, kw_only=True):
    """Fields that chats and raw completions have in common."""

    model: Name | None = None
    temperature: Annotated[float, Meta(ge=0, le=5)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: (
        Annotated[str, Meta(max_length=256, description="An empty text is none.")]
        | Annotated[list[Stop], Meta(max_length=MAX_STOPS)]
        | None
    ) = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] | None = None
    seed: Annotated[int, Meta(ge=-1, le=MAX_SEED, description="-1 is a random one.")] | None = None
    # beyond OpenAI's, by vLLM's names
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: _Probability | None = None
    repetition_penalty: _Repetition | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=1024)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Alternatives | None = None
    truncate_prompt_tokens: (
        Annotated[int, Meta(ge=-1, le=2**31 - 1, description="-1 is as many as the context holds.")] | None
    ) = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    store: Annotated[bool, Meta(description="False: the suffix memory does not keep the text.")] | None = None
    # our own
    speculative: Speculative | None = None
    return_metrics: bool | None = None
    # what the answer must be: OpenAI's, vLLM's and its older ones, llama.cpp's, SGLang's, Ollama's
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Anything = UNSET
    guided_regex: _Source | None = None
    guided_choice: _Choices | None = None
    guided_grammar: _Source | None = None
    grammar: _Source | None = None
    json_schema: Anything = UNSET
    regex: _Source | None = None
    ebnf: _Source | None = None
    format: Annotated[Anything, Meta(description="A JSON schema, or `json` for any object.")] = UNSET
    # what would change the answer
    guided_whitespace_pattern: Annotated[Anything, unsupported()] = UNSET
    best_of: Annotated[Anything, unsupported(1)] = UNSET
    use_beam_search: Annotated[Anything, unsupported(False)] = UNSET
    length_penalty: Annotated[Anything, unsupported(1)] = UNSET
    logits_processors: Annotated[Anything, unsupported([])] = UNSET
    return_tokens_as_token_ids: Annotated[Anything, unsupported(False)] = UNSET
    bad_words: Annotated[Anything, unsupported([])] = UNSET
    # llama.cpp's
    n_predict: Annotated[int, Meta(ge=-2, le=2**31 - 1, description="`max_tokens`; -2 is -1.")] | None = None
    repeat_penalty: Annotated[_Repetition, Meta(description="`repetition_penalty`.")] | None = None
    typical_p: Annotated[Anything, unsupported(1)] = UNSET
    tfs_z: Annotated[Anything, unsupported(1)] = UNSET
    mirostat: Annotated[Anything, unsupported(0)] = UNSET
    dry_multiplier: Annotated[Anything, unsupported(0)] = UNSET
    xtc_probability: Annotated[Anything, unsupported(0)] = UNSET
    dynatemp_range: Annotated[Anything, unsupported(0)] = UNSET


class CompletionRequest(Sampling, kw_only=True):
    """`/v1/completions`, whose `prompt` is a text, token ids, or a list of either.

    With a `suffix` the answer stands between both texts."""

    prompt: Annotated[Text | Prompts, Meta(extra_json_schema=PROMPT)]
    max_tokens: Tokens | None = None
    logprobs: Alternatives | None = None
    echo: bool | None = None
    suffix: Annotated[Text | None, Meta(description="The text after the answer, for models that fill in.")] = None
    add_special_tokens: Annotated[Anything, unsupported(True)] = UNSET


class TextPart(msgspec.Struct):
    type: Literal["text", "input_text", "output_text"]
    text: Text


class CalledFunction(msgspec.Struct, frozen=True):
    """`arguments` is a JSON object or its text; null is no arguments."""

    name: Name
    arguments: Text | dict[str, msgspec.Raw] | None = None


NO_FUNCTION = CalledFunction("")


class SaidCall(msgspec.Struct):
    """A call in an earlier answer. One without an id gets one."""

    id: Name | None = None
    function: Annotated[CalledFunction, Meta(description="Required.")] = NO_FUNCTION
    type: Literal["function"] | None = None


class Said(msgspec.Struct):
    """One message of a conversation.

    Only an assistant's may lack content, and have `tool_calls`, or the older `function_call`. A `tool` says what the
    call with `tool_call_id` has returned; the older `function` says it of the last call of its `name`."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | Annotated[list[Text | TextPart], Meta(max_length=1024)] | None = None
    tool_calls: Annotated[list[SaidCall], Meta(max_length=MAX_CALLS)] | None = None
    tool_call_id: Name | None = None
    reasoning_content: Text | None = None
    name: Annotated[Name, Meta(description="Chat templates know that of a tool.")] | None = None
    refusal: Annotated[Anything, unsupported("")] = UNSET
    function_call: CalledFunction | None = None
    audio: Annotated[Anything, unsupported()] = UNSET


class Function(msgspec.Struct, omit_defaults=True):
    """A tool's name, its purpose, and the JSON schema of its arguments as `parameters`."""

    name: ToolName
    description: Text | None = None
    parameters: dict[str, msgspec.Raw] | None = None
    strict: Annotated[bool | None, Meta(description="Arguments obey all of `parameters`, or are refused.")] = None


class Tool(msgspec.Struct):
    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct):
    name: Name


class AllowedTool(msgspec.Struct):
    """A tool by name."""

    type: Literal["function"] = "function"
    function: FunctionName | None = None
    name: Annotated[Name, Meta(description="It may also stand in `function`.")] | None = None


class AllowedTools(msgspec.Struct):
    """Some of the tools. The model gets only these."""

    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=1024)]
    mode: Literal["auto", "required"] = "auto"


class ChosenTool(AllowedTool):
    """A tool by name, or `allowed_tools`."""

    type: Literal["function", "allowed_tools"] = "function"  # type: ignore[assignment]
    allowed_tools: AllowedTools | None = None


Tools = Annotated[list[Tool], Meta(max_length=1024)]


class ChatRequest(Sampling, kw_only=True):
    """`/v1/chat/completions`."""

    messages: Annotated[list[Said], Meta(min_length=1, max_length=1024)]
    max_completion_tokens: Tokens | None = None
    max_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    return_origins: bool | None = None  # our own
    # how the chat template makes a prompt of the messages, by vLLM's names
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Variables | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required", "any"] | ChosenTool | None = None
    parallel_tool_calls: Annotated[bool, Meta(description="If false, there is one call at most.")] | None = None
    reasoning_effort: Effort | None = None
    functions: Annotated[list[Function], Meta(max_length=1024, description="The older form of tools.")] | None = None
    function_call: Literal["none", "auto"] | FunctionName | None = None
    modalities: Annotated[Anything, unsupported([], ["text"])] = UNSET
    audio: Annotated[Anything, unsupported()] = UNSET
    web_search_options: Annotated[Anything, unsupported()] = UNSET
    documents: Annotated[Anything, unsupported([])] = UNSET
    chat_template: Annotated[Anything, unsupported()] = UNSET
    add_special_tokens: Annotated[Anything, unsupported(False)] = UNSET
    echo: Annotated[Anything, unsupported(False)] = UNSET


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`/tokenize`: a text, or a conversation in the model's chat format."""

    model: Name | None = None
    prompt: Text | None = None
    messages: Annotated[list[Said], Meta(min_length=1, max_length=1024)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Variables | None = None
    reasoning_effort: Effort | None = None
    tools: Tools | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`/detokenize`."""

    model: Name | None = None
    tokens: Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)]
