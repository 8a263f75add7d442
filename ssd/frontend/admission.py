"""What a client may ask: token ids and complete parameters, or a `RequestError` for the client."""

from __future__ import annotations

import secrets

import msgspec

from ssd.config import EngineConfig
from ssd.errors import RequestError
from ssd.frontend.tokenization import Tokenizer
from ssd.ipc.messages import Generate
from ssd.params import MAX_SEED, SamplingParams, Speculation
from ssd.speculation import speculators


def complete(params: SamplingParams, config: EngineConfig) -> SamplingParams:
    """The parameters with seed and speculation filled in. Raises RequestError for what this engine cannot do."""
    params.check()
    speculation = params.speculation or config.speculation
    if speculation.mode != "ar" and config.draft is None:
        raise RequestError(
            "invalid_request", f"mode {speculation.mode} needs a draft, and this engine runs without one"
        )
    if speculation.backup not in speculators.names():
        known = ", ".join(speculators.names())
        raise RequestError("invalid_request", f"no backup {speculation.backup!r}; there are {known}")
    drawn = speculation.mode != "ar" and speculation.ratio_rule(params.temperature)
    if drawn and config.speculation.sampler != "rejection":
        raise RequestError(
            "invalid_request",
            "sampler rejection: this engine was started without it; start it with --sampler rejection",
        )
    if drawn and _larger(speculation, config.speculation):
        raise RequestError(
            "invalid_request",
            "sampler rejection: K and chains must not be more than those that the engine was started with",
        )
    outside = [token for token in (*params.logit_bias, *params.stop_token_ids) if token >= config.vocab_size]
    if outside:
        raise RequestError("invalid_request", _outside(outside[0], config))
    seed = secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed
    return msgspec.structs.replace(params, seed=seed, speculation=speculation)


def text_length(message: Generate, config: EngineConfig, tokenizer: Tokenizer) -> int:
    """Characters that are to be encoded. Raises RequestError for a prompt that is ambiguous, and for one that no
    context could hold, however it is encoded."""
    given = [name for name in ("prompt", "token_ids", "messages") if getattr(message, name) is not None]
    if len(given) != 1:
        raise RequestError(
            "invalid_request", f"give exactly one of prompt, token_ids and messages; got {', '.join(given) or 'none'}"
        )
    length = len(message.prompt or "") + sum(len(said.content) for said in message.messages or ())
    if length > config.max_model_len * tokenizer.longest_token:
        raise RequestError(
            "context_length_exceeded",
            f"a prompt of {length} characters; the context of {config.max_model_len} tokens cannot hold it",
        )
    return length


def prompt_ids(message: Generate, config: EngineConfig, tokenizer: Tokenizer) -> list[int]:
    """Token ids within the vocabulary and the context; RequestError for others.

    Takes as long as encoding a long text does, and may run in any thread.
    """
    token_ids = _encoded(message, tokenizer)
    if not token_ids:
        raise RequestError("invalid_request", "the prompt is empty")
    if max(token_ids) >= config.vocab_size:
        raise RequestError("invalid_request", _outside(max(token_ids), config))
    if len(token_ids) >= config.max_model_len:
        raise RequestError(
            "context_length_exceeded",
            f"the prompt has {len(token_ids)} tokens; the context of {config.max_model_len} tokens must hold it and "
            "at least one more",
        )
    return token_ids


def _outside(token: int, config: EngineConfig) -> str:
    return f"token id {token} is outside of the vocabulary of {config.vocab_size} tokens"


def _larger(asked: Speculation, provided: Speculation) -> bool:
    return asked.longest > provided.longest or asked.chains > provided.chains


def _encoded(message: Generate, tokenizer: Tokenizer) -> list[int]:
    if message.token_ids is not None:
        return message.token_ids
    # Checked before encoding: a tokenizer may turn an empty text into its special tokens.
    if message.prompt is not None:
        return tokenizer.encode(message.prompt) if message.prompt else []
    return tokenizer.encode_chat(message.messages) if message.messages else []
