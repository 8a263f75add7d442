"""What a client may ask: a `Generate` becomes token ids and complete parameters, or a `RequestError` for the client."""

from __future__ import annotations

import secrets

import msgspec

from ssd.config import EngineConfig
from ssd.errors import RequestError
from ssd.frontend.tokenization import Tokenizer
from ssd.ipc.messages import Generate
from ssd.params import MAX_SEED, SamplingParams, Speculation
from ssd.speculation import speculators


def admit(message: Generate, config: EngineConfig, tokenizer: Tokenizer) -> tuple[list[int], SamplingParams]:
    """Token ids within the vocabulary and the context, and parameters with seed and speculation filled in."""
    params = _complete(message.params, config)
    token_ids = _prompt_ids(message, tokenizer)
    if not token_ids:
        raise RequestError("invalid_request", "the prompt is empty")
    if max(token_ids) >= config.vocab_size:
        raise RequestError(
            "invalid_request", f"token id {max(token_ids)} is outside of the vocabulary of {config.vocab_size} tokens"
        )
    if len(token_ids) >= config.max_model_len:
        raise RequestError(
            "context_length_exceeded",
            f"the prompt has {len(token_ids)} tokens; the context of {config.max_model_len} tokens must hold it and "
            "at least one more",
        )
    return token_ids, params


def _complete(params: SamplingParams, config: EngineConfig) -> SamplingParams:
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
    seed = secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed
    return msgspec.structs.replace(params, seed=seed, speculation=speculation)


def _larger(asked: Speculation, provided: Speculation) -> bool:
    return asked.longest > provided.longest or asked.chains > provided.chains


def _prompt_ids(message: Generate, tokenizer: Tokenizer) -> list[int]:
    given = [name for name in ("prompt", "token_ids", "messages") if getattr(message, name) is not None]
    if len(given) != 1:
        raise RequestError(
            "invalid_request", f"give exactly one of prompt, token_ids and messages; got {', '.join(given) or 'none'}"
        )
    if message.token_ids is not None:
        return message.token_ids
    # Checked before encoding: a tokenizer may turn an empty text into its special tokens.
    if message.prompt is not None:
        return tokenizer.encode(message.prompt) if message.prompt else []
    return tokenizer.encode_chat(message.messages) if message.messages else []
