"""Rotary position embedding (Su et al., arXiv 2104.09864) with the scalings that checkpoints name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ssd.errors import UsageError
from ssd.kernels import cpu
from ssd.layers.attention import CachePlaces
from ssd.layers.norm import RMSNorm
from ssd.system.fields import Config, count, flag, mapping, number

SCALINGS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


@dataclass(frozen=True)
class Frequencies:
    """Rotations of a head: `inverse` float32 [rotated / 2] has the radians a position for each pair of numbers.

    `attention_factor` multiplies cosines and sines. The first `rotated` numbers of a head are rotated."""

    inverse: Tensor
    attention_factor: float = 1.0


class Rotary:
    """Rotates queries and keys by their positions.

    `tables`: cosines and sines, each [max_position, rotated]. The first half of the sines is negative."""

    def __init__(
        self, frequencies: Frequencies, max_position: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        angles = torch.arange(max_position, dtype=torch.float32)[:, None] * frequencies.inverse.float().cpu()
        cos, sin = (part * frequencies.attention_factor for part in (angles.cos(), angles.sin()))
        self.tables = (
            torch.cat((cos, cos), dim=-1).to(device, dtype),
            torch.cat((-sin, sin), dim=-1).to(device, dtype),
        )
        self._half = frequencies.inverse.shape[0]
        self.in_one_call = type(self).__call__ is Rotary.__call__
        """True if kernels that read `tables` rotate as this class does: a subclass may pair other numbers."""
        self._kernel = cpu.serve(self.tables[0])

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, sin), each [n, 1, rotated], for `positions` int64 [n]."""
        cos, sin = self.tables
        return cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)

    def __call__(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate x [n, heads, head_dim]; number i of a head is paired with number i + rotated / 2."""
        cos, sin = table
        if (rotated := 2 * self._half) < x.shape[-1]:
            return torch.cat((self(x[..., :rotated], table), x[..., rotated:]), dim=-1)
        if self._kernel:
            return cpu.rotate(x, cos, sin)
        return torch.addcmul(x * cos, x.roll(self._half, -1), sin)


def turned(
    projected: Tensor, kv_heads: int, table: tuple[Tensor, Tensor], norms: Sequence[RMSNorm], places: CachePlaces
) -> Tensor:
    """Return the rotated queries [n, heads, dim] of `projected` [n, heads + 2 * kv_heads, dim], in one launch.

    Rotated keys and values go to their `places`. `norms`, if any, norm queries and keys first. Only for devices that
    `ssd.kernels.gpu.fuses`."""
    from ssd.layers.triton_fused import turn

    weights = (norms[0].weight, norms[1].weight) if norms else None
    return turn(projected, kv_heads, table, weights, norms[0].least if norms else 0.0, *places[:3])


def frequencies(head_dim: int, config: Config, max_position: int, partly: bool = False) -> Frequencies:
    """Return the frequencies of a config, by the formulas of transformers' `modeling_rope_utils`.

    Every sequence counts as `max_position` long for dynamic and longrope scaling, as cached keys cannot be rotated
    again. `frequency_factors`, a list of head_dim / 2 numbers, divides the frequencies of the kind "default"
    (`rope_freqs.weight` of a GGUF). Raises `UsageError` for unknown scalings, and for partly rotated heads unless the
    family has them (`partly`)."""
    scaling = rope_parameters(config)
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise UsageError("rope_parameters that differ by kind of layer are not supported in this family")
    rotated = _rotated(head_dim, scaling, config, partly)
    theta = number(scaling, "rope_theta", number(config, "rope_theta", 10000.0))
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
    plain, kind = 1.0 / theta**exponents, scaling.get("rope_type", scaling.get("type", "default"))
    if "frequency_factors" in scaling and kind != "default":
        raise UsageError(f"frequency_factors are not supported beside the rope scaling {kind!r}")
    match kind:
        case "default":
            return Frequencies(plain / _factors(scaling, "frequency_factors", rotated, 1.0))
        case "linear":
            return Frequencies(plain / number(scaling, "factor"))
        case "dynamic":
            return Frequencies(1.0 / _dynamic(theta, rotated, scaling, config, max_position) ** exponents)
        case "llama3":
            return Frequencies(_llama3(plain, scaling, _trained_on(scaling, config)))
        case "yarn":
            return _yarn(theta, theta**exponents, scaling, config)
        case "longrope":
            return _longrope(theta**exponents, scaling, config, max_position)
    raise UsageError(f"rope scaling {kind!r} is not supported ({', '.join(SCALINGS)} are)")


def rope_parameters(config: Config) -> Config:
    """Return the `rope_parameters` of a config, or its old `rope_scaling`. Raises `UsageError` if they differ."""
    new, old = mapping(config, "rope_parameters"), mapping(config, "rope_scaling")
    if new and old and not old.items() <= new.items():
        raise UsageError("rope_parameters and rope_scaling contradict each other: remove one of them")
    return new or old


def _rotated(head_dim: int, scaling: Config, config: Config, partly: bool) -> int:
    part = number(scaling, "partial_rotary_factor", number(config, "partial_rotary_factor", 1.0))
    if part != 1.0 and not partly:
        raise UsageError(f"partial_rotary_factor {part} is not supported in this family: heads are rotated whole")
    rotated = int(head_dim * part)
    if not 2 <= rotated <= head_dim or rotated % 2:
        raise UsageError(f"{rotated} numbers of heads of {head_dim} cannot be rotated in pairs")
    return rotated


def _trained_on(scaling: Config, config: Config) -> int:
    # The number outside of the scaling counts first, as in transformers.
    name = "original_max_position_embeddings"
    return count(config, name, scaling.get(name) or config.get("max_position_embeddings"))


def _stretch(scaling: Config, config: Config, known: int) -> float:
    return number(scaling, "factor", count(config, "max_position_embeddings", known) / known)


def _factors(scaling: Config, name: str, rotated: int, default: float | None = None) -> Tensor:
    values = scaling.get(name)
    if values is None and default is not None:
        return torch.tensor(default)
    if not isinstance(values, list) or len(values) != rotated // 2:
        raise UsageError(f"{name} must be a list of {rotated // 2} numbers")
    return torch.tensor([number({name: value}, name) for value in values])


def _dynamic(theta: float, rotated: int, scaling: Config, config: Config, max_position: int) -> float:
    known, factor = count(config, "max_position_embeddings", max_position), number(scaling, "factor")
    if rotated < 4:
        raise UsageError(f"rope scaling 'dynamic' needs heads with more than {rotated} rotated numbers")
    stretch = factor * max(max_position, known) / known - (factor - 1)
    return theta * stretch ** (rotated / (rotated - 2))


def _llama3(plain: Tensor, scaling: Config, known: float) -> Tensor:
    # Slows long waves by `factor`, keeps short ones, interpolates between them.
    factor, low, high = (number(scaling, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise UsageError(f"low_freq_factor {low} is not below high_freq_factor {high}")
    waves_in_context = known * plain / (2 * math.pi)
    smooth = ((waves_in_context - low) / (high - low)).clamp(0, 1)
    return plain / factor * (1 - smooth) + plain * smooth


def _yarn(theta: float, waves: Tensor, scaling: Config, config: Config) -> Frequencies:
    """Return the frequencies of YaRN (Peng et al., arXiv 2309.00071, section 3.2).

    Pairs that turn more than `beta_fast` times in the trained context keep their frequency, pairs that turn less than
    `beta_slow` times are slowed by the factor, pairs between them interpolated. Cosines and sines are multiplied by 0.1
    ln(factor) + 1 (equation 22), by DeepSeek's quotient of two such numbers, or by `attention_factor`."""
    known, rotated = _trained_on(scaling, config), 2 * waves.shape[0]
    factor = _stretch(scaling, config, known)

    def scale(weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = scale()
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        attention_factor = scale(number(scaling, "mscale")) / scale(number(scaling, "mscale_all_dim"))

    def place(turns: float) -> float:
        return rotated * math.log(known / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = place(number(scaling, "beta_fast", 32.0)), place(number(scaling, "beta_slow", 1.0))
    if flag(scaling, "truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    ramp = (torch.arange(rotated // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    inverse = 1.0 / (factor * waves) * (1 - kept) + 1.0 / waves * kept
    return Frequencies(inverse, number(scaling, "attention_factor", attention_factor))


def _longrope(waves: Tensor, scaling: Config, config: Config, max_position: int) -> Frequencies:
    """Return the frequencies of LongRoPE (Ding et al., arXiv 2402.13753), with a factor for each frequency.

    As in vLLM, the factors for long sequences serve all sequences if any may exceed the trained context."""
    known, rotated = _trained_on(scaling, config), 2 * waves.shape[0]
    factors = {name: _factors(scaling, name, rotated) for name in ("short_factor", "long_factor")}
    factor, attention_factor = _stretch(scaling, config, known), 1.0
    if factor > 1 and scaling.get("attention_factor") is None:
        if known < 2:
            raise UsageError("original_max_position_embeddings must be above 1 without an attention_factor")
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(known))
    inverse = 1.0 / (factors["long_factor" if max_position > known else "short_factor"] * waves)
    return Frequencies(inverse, number(scaling, "attention_factor", attention_factor))
