"""Checks requests: gives complete parameters and token ids, or raises a `RequestError` for the client."""

from __future__ import annotations

import secrets

import msgspec

from ssd.config.engine import EngineConfig
from ssd.config.params import DRAFTED, MAX_SEED, SamplingParams, Speculation
from ssd.errors import RequestError
from ssd.frontend.detokenization import Vocabulary
from ssd.frontend.text_jobs import Encode
from ssd.ipc import sockets
from ssd.ipc.public import Generate
from ssd.speculation import backups as speculators
from ssd.speculation.rules import AcceptanceRule

# In bytes. The log-probabilities of a prompt come in one message, and may take half of it.
_LOGPROBS_BYTES = sockets.INTERNAL_BYTES // 2
_TOKEN_BYTES, _ALTERNATIVE_BYTES = 40, 15


def complete(params: SamplingParams | None, config: EngineConfig) -> SamplingParams:
    """Return the parameters with seed and speculation filled in; None is the model's own sampling.

    Raises RequestError for parameters that are invalid or that this engine cannot serve."""
    params = config.sampling.params() if params is None else params
    params.check()
    speculation = params.speculation or config.speculation
    cause = _unable(speculation, speculation.rule(params.temperature), config)
    if cause is not None:
        raise RequestError("invalid_request", cause, "speculation")
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        tokens = getattr(params, name)
        if tokens and max(tokens) >= config.vocab_size:
            raise RequestError("invalid_request", _outside(max(tokens), config), name)
    seed = secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed
    return msgspec.structs.replace(params, seed=seed, speculation=speculation)


def text_of(
    message: Generate, config: EngineConfig, vocabulary: Vocabulary, plain_tools: bool = False
) -> Encode | None:
    """Return the text to encode, or None where the prompt is token ids.

    Raises RequestError for an ambiguous or empty prompt, and for one that is too long for the context in any
    encoding."""
    given = [name for name in ("prompt", "token_ids", "messages") if getattr(message, name) is not None]
    if len(given) != 1:
        raise RequestError(
            "invalid_request", f"give exactly one of prompt, token_ids and messages; got {', '.join(given) or 'none'}"
        )
    length = len(message.prompt or "") + sum(len(said.content) for said in message.messages or ())
    keep = message.params.truncate_prompt_tokens if message.params else None
    if keep is None and length > config.max_model_len * vocabulary.longest_token:
        raise RequestError(
            "context_length_exceeded",
            f"a prompt of {length} characters; the context of {config.max_model_len} tokens cannot hold it",
        )
    if message.token_ids is not None:
        return None
    # A tokenizer may turn an empty text into its special tokens.
    if not message.prompt and not message.messages:
        raise RequestError("invalid_request", "the prompt is empty")
    if message.messages is not None and not vocabulary.has_chat:
        raise RequestError("invalid_request", no_chat(vocabulary))
    # Only the count of a prompt that is too long is needed.
    most = config.max_model_len
    return Encode(message.prompt, message.messages, message.chat, most=most, keep=keep, plain_tools=plain_tools)


def no_chat(vocabulary: Vocabulary) -> str:
    """Return why this model has no chat."""
    return vocabulary.no_chat or "this model has no chat template; give a raw prompt"


def checked_ids(token_ids: list[int], count: int, message: Generate, config: EngineConfig) -> list[int]:
    """Return `token_ids`, the ids of a prompt, after checks. `count` is their number, also where they were left out.

    Raises RequestError for an empty prompt, for ids outside of the vocabulary, for a prompt that does not fit the
    context, and for one too long for the log-probabilities that it asks for."""
    if not count:
        raise RequestError("invalid_request", "the prompt is empty")
    if token_ids and max(token_ids) >= config.vocab_size:
        cause = _outside(max(token_ids), config)
        if message.token_ids is None:
            cause = f"{cause}: the tokenizer beside the model does not match it"
        raise RequestError("invalid_request", cause)
    if count >= config.max_model_len:
        raise RequestError(
            "context_length_exceeded",
            f"the prompt has {count} tokens{' with its tools' if message.chat.tools != '[]' else ''}; the context of "
            f"{config.max_model_len} tokens must hold it and at least one more",
        )
    wanted = message.params.prompt_logprobs if message.params else None
    if wanted is not None and count > most_scored(wanted):
        raise RequestError(
            "invalid_request",
            f"the prompt has {count} tokens; log-probabilities with {wanted} alternatives are given for "
            f"prompts of at most {most_scored(wanted)}",
        )
    return token_ids


def most_scored(alternatives: int) -> int:
    """Return the longest prompt, in tokens, that can get log-probabilities with `alternatives` each."""
    return _LOGPROBS_BYTES // (_TOKEN_BYTES + _ALTERNATIVE_BYTES * alternatives)


def _unable(speculation: Speculation, rule: AcceptanceRule, config: EngineConfig) -> str | None:
    """Return why this engine cannot use `speculation` with its `rule`, or None."""
    if speculation.mode in DRAFTED and not config.has_draft:
        return f"mode {speculation.mode} needs a draft, and this engine runs without one"
    if speculation.backup not in speculators.names():
        return f"no backup {speculation.backup!r}; there are {', '.join(speculators.names())}"
    if speculation.mode in ("ar", "ngram") or not rule.needs_draft_probs:
        return None
    provided = config.speculation
    name = speculation.sampler
    if not provided.rule().needs_draft_probs:
        return f"sampler {name}: this engine was started without it; start it with --sampler {name}"
    if speculation.longest > provided.longest or speculation.chains > provided.chains:
        return f"sampler {name}: K and chains must not be more than those that the engine was started with"
    return None


def _outside(token: int, config: EngineConfig) -> str:
    return f"token id {token} is outside of the vocabulary of {config.vocab_size} tokens"
