"""Converts the fields of a body to sampling parameters."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from ssd.config.engine import EngineConfig
from ssd.config.params import SamplingParams, Speculation, derived_seed
from ssd.frontend.http.bodies import Sampling
from ssd.frontend.http.errors import HttpError, cut, invalid

_Body = TypeVar("_Body")
# Fields with the same name in body and SamplingParams; null means the default.
_SAME = (
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "cache_salt",
)


def decode(raw: bytes, decoder: msgspec.json.Decoder[_Body]) -> _Body:
    """Decodes a body. Raises HttpError 400 that names the parameter that is wrong, unknown or not supported."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(None, f"the body is no valid JSON: {error}", "invalid_json") from None


def _named(message: str) -> HttpError:
    path = re.search(r" - at `\$\.?([^`]*)`$", message)
    param = path[1] if path and path[1] else None
    text = message[: path.start()] if path else message
    unknown = re.search(r"unknown field `([^`]*)`", text)
    if unknown:
        param = f"{param}.{cut(unknown[1])}" if param else cut(unknown[1])
        return invalid(param, f"unknown parameter: {param}", "unknown_parameter")
    missing = re.search(r"missing required field `([^`]*)`", text)
    if missing:
        param = f"{param}.{missing[1]}" if param else missing[1]
        return invalid(param, f"{param} is required", "missing_parameter")
    if text.startswith("Expected `null`"):
        return invalid(param, f"{param} is not supported", "unsupported_parameter")
    value = re.fullmatch(r"Invalid enum value '(.*)'", text, re.DOTALL)
    if value:
        text = f"Invalid enum value '{cut(value[1])}'"
    return invalid(param, f"{param}: {text}" if param else text)


def sampling(body: Sampling, config: EngineConfig, **given: Any) -> SamplingParams:
    """Returns the parameters that all choices of a request share; admission checks them. Raises HttpError."""
    if given["max_tokens"] > config.max_model_len:
        raise invalid(
            "max_tokens", f"max_tokens is {given['max_tokens']}; the context has {config.max_model_len} tokens"
        )
    fields = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),  # -1 means off, too
        logit_bias=_biases(body.logit_bias or {}),
        stop=tuple(stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        seed=body.seed,
        speculation=_speculation(body, config),
        **fields,
        **given,
    )


def each_choice(params: SamplingParams, n: int) -> list[SamplingParams]:
    """Returns the parameters of `n` choices, with seeds derived from the given one.
    Without a seed each choice draws its own."""
    if params.seed is None:
        return [params] * n
    return [msgspec.structs.replace(params, seed=derived_seed(params.seed, index)) for index in range(n)]


def count(body: Sampling, config: EngineConfig) -> int:
    """Returns the number of choices asked for. Raises HttpError for too many."""
    n, most = body.n or 1, config.server.limits.max_n
    if n > most:
        raise invalid("n", f"n is {n}; at most {most} choices are made of a prompt")
    return n


def _biases(biases: dict[str, float]) -> dict[int, float]:
    for token in biases:
        if not re.fullmatch(r"[0-9]{1,9}", token):
            raise invalid("logit_bias", f"logit_bias: {cut(token)!r} is no token id")
    return {int(token): bias for token, bias in biases.items()}


def _speculation(body: Sampling, config: EngineConfig) -> Speculation | None:
    """Returns the speculation that this request asks for, or None for the engine's. Raises HttpError."""
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
