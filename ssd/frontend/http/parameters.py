"""The sampling parameters that the fields of a body ask for. A wrong field raises HttpError."""

from __future__ import annotations

import operator
import re
from typing import Any

import msgspec

from ssd.config.engine import EngineConfig
from ssd.config.params import SamplingParams, Speculation, derived_seed
from ssd.frontend.http.bodies import Sampling
from ssd.frontend.http.errors import cut, invalid

_SHARED = [name for name in SamplingParams.__struct_fields__ if name in Sampling.__struct_fields__]
_shared = operator.attrgetter(*_SHARED)
_TEMPERATURE = 1.0  # OpenAI's, where neither the request nor the model says one


def sampling(body: Sampling, config: EngineConfig, **given: Any) -> SamplingParams:
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs", "prompt_logprobs cannot be streamed")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    asked = dict(zip(_SHARED, _shared(body), strict=True)) | given
    if body.temperature is None and config.sampling.temperature is None:
        asked["temperature"] = _TEMPERATURE
    asked |= {
        "top_k": 0 if body.top_k == -1 else body.top_k,  # both mean off
        "max_tokens": min(given["max_tokens"], config.max_model_len),  # the context ends it anyway
        "repetition_penalty": agreed(repetition_penalty=body.repetition_penalty, repeat_penalty=body.repeat_penalty),
        "logit_bias": _biases(body.logit_bias or {}),
        "stop": tuple(filter(None, stop)),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "allowed_token_ids": tuple(body.allowed_token_ids or ()),
        "seed": None if body.seed == -1 else body.seed,
        "speculation": _speculation(body, config),
        "truncate_prompt_tokens": _truncation(body.truncate_prompt_tokens, config),
    }
    return config.sampling.params(**asked)


def agreed(**values: Any) -> Any:
    """Return the value of several names of one parameter, None if none has one. Raises HttpError if they differ."""
    found, first = None, ""
    for name, value in values.items():
        if found is None:
            found, first = value, name
        elif value is not None and value != found:
            raise invalid(name, f"{first} and {name} differ, and mean the same; give one")
    return found


def most_tokens(config: EngineConfig, default: int, **values: int | None) -> int:
    """Return the most tokens of an answer by several names of the limit: the context's below 0, `default` for None."""
    found: int | None = agreed(**values)
    return default if found is None else config.max_model_len if found < 0 else found


def each_choice(params: SamplingParams, n: int) -> list[SamplingParams]:
    """Return the parameters of `n` choices, with seeds derived from the given one, or none."""
    if params.seed is None:
        return [params] * n
    return [msgspec.structs.replace(params, seed=derived_seed(params.seed, index)) for index in range(n)]


def count(body: Sampling, config: EngineConfig) -> int:
    n, most = body.n or 1, config.server.limits.max_n
    if n > most:
        raise invalid("n", f"n is {n}; at most {most} choices are made of a prompt")
    return n


def check_one_choice(body: Sampling) -> None:
    """Raise HttpError for what only chats and completions of OpenAI's interface have."""
    asked = {
        "n": (body.n or 1) > 1,
        "prompt_logprobs": body.prompt_logprobs is not None,
        "return_token_ids": body.return_token_ids,
        "return_metrics": body.return_metrics,
    }
    for name in asked:
        if asked[name]:
            raise invalid(name, f"{name} is not supported here; /v1/chat/completions has it", "unsupported_parameter")


def _biases(biases: dict[str, float]) -> dict[int, float]:
    for token in biases:
        if not re.fullmatch(r"[0-9]{1,9}", token):
            raise invalid("logit_bias", f"logit_bias: {cut(token)!r} is no token id")
    return {int(token): bias for token, bias in biases.items()}


def _truncation(asked: int | None, config: EngineConfig) -> int | None:
    if asked == 0:
        raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens must be at least 1, or -1")
    return config.max_model_len - 1 if asked == -1 else asked  # one more is for the answer


def _speculation(body: Sampling, config: EngineConfig) -> Speculation | None:
    asked = body.speculative
    if asked is None:
        return None
    if not asked.enabled:
        return Speculation("ar")
    if config.speculation.mode == "ar":
        raise invalid("speculative", "speculative: this engine runs in mode ar, which does not speculate")
    if asked.num_speculative_tokens is None:
        return None
    fan_out = config.speculation.fan_out if len(config.speculation.fan_out) == 1 else ()
    return msgspec.structs.replace(
        config.speculation, num_speculative_tokens=asked.num_speculative_tokens, fan_out=fan_out
    )
