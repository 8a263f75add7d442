"""Counter-based Gumbel noise that target and draft share (arXiv 2408.07978).

A token's noise depends on request seed, absolute position and token id alone. Integer hashes give the same bits on
every device; only the two logarithms at the end are floating point."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor

from ssd.kernels import cpu
from ssd.kernels.gpu import fused

_MASK64 = 2**64 - 1
# Hashes computed at a time: few enough for a processor's cache.
_AT_ONCE = 2**16

Place = tuple[int, int]
"""(request seed, absolute position)."""


class Stream(IntEnum):
    """Independent random streams of a request. `coupled` uses SHARED, which would bias the ratio rule."""

    SHARED = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    BONUS = 4


def stream_seed(seed: int, stream: Stream) -> int:
    return seed if stream is Stream.SHARED else _splitmix64(seed ^ (stream << 56)) >> 1


def _splitmix64(state: int) -> int:
    """Apply the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    state = (state + 0x9E3779B97F4A7C15) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)


def _signed32(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


def _mix32(lanes: Tensor) -> Tensor:
    """Apply MurmurHash3's 32-bit finaliser (Appleby, public domain) to int32, in place."""
    lanes ^= (lanes >> 16) & 0xFFFF
    lanes *= _signed32(0x85EBCA6B)
    lanes ^= (lanes >> 13) & 0x7FFFF
    lanes *= _signed32(0xC2B2AE35)
    lanes ^= (lanes >> 16) & 0xFFFF
    return lanes


def keys_of(places: Sequence[Place], device: torch.device | str = "cpu") -> Tensor:
    """Return the keys of the noise at n places: int32 [n, 2]."""
    return torch.tensor([halves(place) for place in places], dtype=torch.int32, device=device)


@lru_cache(2**14)  # chains and steps ask for the same places
def halves(place: Place) -> tuple[int, int]:
    """Return the key of a place's noise: two signed 32-bit numbers."""
    seed, position = place
    key = _splitmix64(_splitmix64(seed) ^ position)
    return _signed32(key & 0xFFFFFFFF), _signed32(key >> 32)


def lanes_of(keys: Tensor, ids: Tensor) -> Tensor:
    """Return uniform bits by keys int32 [n, 2] for token ids int32 [k]: int32 [n, k]."""
    low, high = keys.T[..., None]
    lanes = _mix32(ids * _signed32(0x9E3779B1) + low)
    lanes ^= high
    return _mix32(lanes)


def gumbel(seed: int, position: int, vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """Return float32 [vocab_size] of Gumbel noise: -log(E), E = -log1p(-u), u of 31 random bits.

    E is precise near 0, where the noise is largest and decides the argmax."""
    return gumbels_of(keys_of([(seed, position)], device), vocab_size)[0]


@fused
def gumbels_of(keys: Tensor, size: int, first: int = 0, ids: Tensor | None = None) -> Tensor:
    """Return `gumbel` of keys int32 [n, 2] for `ids` int64 [size], or from `first` on: float32 [n, size].

    Our kernels' logarithms differ from torch's in the last bits."""
    if cpu.present(keys.device):
        return cpu.gumbels_of(keys, size, first, ids)
    own = torch.arange(first, first + size, dtype=torch.int32, device=keys.device) if ids is None else ids.int()
    lanes = lanes_of(keys, own)
    uniform = (lanes & 0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) of 53 random bits for (seed, position)."""
    return (_splitmix64(_splitmix64(seed) ^ position) >> 11) * 2.0**-53


class NoiseCache:
    """Recently used noise vectors by (seed, position), at most `capacity` of them.

    A vector is of `vocab_size` ids from `first` on, or of `ids` int64 [vocab_size] on the device."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device | str = "cpu",
        most_bytes: int = 2**26,
        first: int = 0,
        ids: Tensor | None = None,
    ) -> None:
        self._vocab_size, self._device, self._first, self.ids = vocab_size, device, first, ids
        self.capacity = max(64, most_bytes // (4 * vocab_size))
        self._vectors: OrderedDict[Place, Tensor] = OrderedDict()

    def __call__(self, seed: int, position: int) -> Tensor:
        """Return `gumbel` noise, float32 [vocab_size]."""
        place = (seed, position)
        if place not in self._vectors:
            self.prepare([place])
        self._vectors.move_to_end(place)
        return self._vectors[place]

    def prepare(self, places: Iterable[Place]) -> None:
        """Compute vectors that will be asked for soon: one alone costs nearly as much as several."""
        missing = [place for place in dict.fromkeys(places) if place not in self._vectors][: self.capacity]
        count = max(1, _AT_ONCE // self._vocab_size)
        for start in range(0, len(missing), count):
            part = missing[start : start + count]
            made = gumbels_of(keys_of(part, self._device), self._vocab_size, self._first, self.ids)
            self._vectors |= zip(part, made, strict=True)
        while len(self._vectors) > self.capacity:
            self._vectors.popitem(last=False)
