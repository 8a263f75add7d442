"""From logits to tokens. All modes call the same functions, so that `ar`, `sd` and `ssd` cannot differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ssd.kernels import cpu
from ssd.kernels.cpu import Ranked
from ssd.kernels.gpu import fuses
from ssd.speculation.noise import gumbels_at, gumbels_of

_BLOCK = 128
_NUCLEUS = 256


class Law(NamedTuple):
    """How logits become a distribution. Temperature 0 is greedy; top_k 0, top_p 1, min_p 0 switch a filter off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    @property
    def filters(self) -> bool:
        """Whether it leaves out tokens."""
        return self.temperature > 0.0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


Noise = Callable[[int, int], Tensor]


def perturbed(logits: Tensor, law: Law, positions: Sequence[int], noise: Noise) -> Tensor:
    """Returns scores [n, V] in float32 whose argmax is the sample of each row of `logits` [n, V].

    Row i stands at absolute position `positions[i]`. Greedy scores are the logits themselves. Otherwise they are the
    filtered logits at the law's temperature plus the Gumbel noise of (seed, position)."""
    if law.temperature == 0.0:
        return logits.float()
    scaled = filtered(logits.float() / law.temperature, law)
    for row, position in zip(scaled, positions, strict=True):
        row += noise(law.seed, position)
    return scaled


def warmth(law: Law, positions: Sequence[int], noise: Noise) -> cpu.Warmth:
    """Returns what the C kernels need to do the same, for a law that filters nothing."""
    if law.temperature == 0.0:
        return [None] * len(positions)
    return [(law.temperature, noise(law.seed, position)) for position in positions]


def filtered(scaled: Tensor, law: Law) -> Tensor:
    """Returns `scaled` [n, V], logits over temperature, with the tokens outside min-p, top-k and top-p at -inf.

    Ties at a border are kept: top-p keeps every token as likely as the last one needed to reach p."""
    if law.min_p > 0.0:
        floor = scaled.amax(-1, keepdim=True) + torch.log(torch.tensor(law.min_p, dtype=scaled.dtype))
        scaled = scaled.masked_fill(scaled < floor, -torch.inf)
    if 0 < law.top_k < scaled.shape[-1]:
        kth = torch.topk(scaled, law.top_k).values[:, -1:]
        scaled = scaled.masked_fill(scaled < kth, -torch.inf)
    if law.top_p < 1.0 and len(scaled):  # a prefill chunk has no rows
        floor = torch.stack([_nucleus_floor(row, law.top_p) for row in scaled])
        scaled = scaled.masked_fill(scaled < floor[:, None], -torch.inf)
    return scaled


def _nucleus_floor(row: Tensor, top_p: float) -> Tensor:
    """Returns the logit of the last token of `row` [V] needed for probability `top_p` (Holtzman, arXiv 1904.09751).

    Tries the likeliest few first, which nearly always suffice: sorting a whole vocabulary takes milliseconds."""
    total = torch.logsumexp(row, dim=-1)
    for count in (_NUCLEUS, row.shape[-1]):
        best = torch.topk(row, min(count, row.shape[-1])).values
        short = (best - total).exp().cumsum(-1) < top_p
        if not short[-1]:
            return best[short.sum()]
    return best[-1]


def probabilities(logits: Tensor, law: Law) -> Tensor:
    """Returns rows of `logits` [n, V] as probabilities in float32, under a law with temperature > 0."""
    return torch.softmax(filtered(logits.float() / law.temperature, law), dim=-1)


def saguaro(scaled: Tensor, fan_outs: Sequence[int], c: float) -> Tensor:
    """Returns `scaled` [n, V] with the weight of each row's `fan_outs[row]` best tokens multiplied by `c`, 0 to 1.

    Saguaro sampling (arXiv 2603.03251, Definition 14): the draft proposes the prepared tokens less often, so that more
    of the residual, and the bonus token, falls on them. With `c` 0 a row with all its mass in them stays as it is."""
    if c == 1.0:
        return scaled
    lowered = scaled.clone()
    for row, fan_out in zip(lowered, fan_outs, strict=True):
        best = torch.topk(row, min(fan_out, row.shape[-1])).indices
        row[best] += math.log(c) if c > 0.0 else -torch.inf
    empty = ~(lowered > -torch.inf).any(-1, keepdim=True)
    return torch.where(empty, scaled, lowered)


def argmax(scores: Tensor) -> list[int]:
    """Returns the id of the largest score of each row of [n, V], the lowest one on a tie.

    It is -1 for a row without a sample: one that holds a NaN or has no finite maximum."""
    if cpu.serve(scores):
        return cpu.draw(scores)
    ids, values = best(scores)
    return checked(ids, values)


def best(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the id of each row's largest score, the lowest one on a tie, and that score; NaN if the row holds one.

    Two passes over blocks of [n, V]: reducing without indices is several times faster than `Tensor.argmax` on a CPU."""
    rows, vocab_size = scores.shape
    if vocab_size % _BLOCK:
        largest = scores.max(-1)
        return largest.indices, largest.values
    blocks = scores.view(rows, vocab_size // _BLOCK, _BLOCK)
    highest = blocks.amax(-1)
    block = highest.argmax(-1)
    inside = blocks[torch.arange(rows, device=scores.device), block].max(-1)
    return block * _BLOCK + inside.indices, inside.values


def checked(ids: Tensor, values: Tensor) -> list[int]:
    """`sound` as a list; one copy from the device."""
    tokens: list[int] = sound(ids, values).tolist()
    return tokens


def sound(ids: Tensor, values: Tensor) -> Tensor:
    """Returns `ids`, with -1 where the `values` are no finite numbers."""
    return torch.where(values.isfinite(), ids, -1)


def likeliest(logits: Tensor) -> Tensor:
    """`argmax` of logits [n, V] as a tensor int64 [n], without waiting for the device."""
    if fuses(logits.device):
        from ssd.kernels.triton_sampling import draw

        return draw(logits)
    return sound(*best(logits.float()))


def drawn(logits: Tensor, keys: Tensor, inverse_temperatures: Tensor) -> Tensor:
    """`argmax(perturbed(...))` of logits [n, V] as a tensor, without waiting for the device; see `warmed`."""
    if fuses(logits.device):
        from ssd.kernels.triton_sampling import draw

        return draw(logits, keys, inverse_temperatures)
    return sound(*best(warmed(logits, keys, inverse_temperatures)))


def warmed(logits: Tensor, keys: Tensor, inverse_temperatures: Tensor, ids: Tensor | None = None) -> Tensor:
    """`perturbed` of logits [n, V] under laws that filter nothing, without waiting for the device.

    `inverse_temperatures` float32 [n] are 0 for greedy rows; `keys` int32 [n, 2] are those of the noise. The tokens are
    `ids` int64 [V], or 0 to V - 1. A GPU divides by a number as it multiplies by its inverse, so these are the scores
    of `perturbed` there."""
    if fuses(logits.device):
        from ssd.kernels import triton_sampling

        return triton_sampling.warmed(logits, keys, inverse_temperatures, ids)
    noise = gumbels_of(keys, logits.shape[1]) if ids is None else gumbels_at(keys, ids)
    scores, inverse = logits.float(), inverse_temperatures[:, None]
    return torch.where(inverse > 0, scores * inverse + noise, scores)


def ranked(scores: Tensor, count: int) -> Ranked:
    """Returns the `count` best ids of each row of [n, V], at most V, best first; equals in no particular order."""
    count = min(count, scores.shape[1])
    if cpu.serve(scores):
        return cpu.rank(scores, count)
    ids, values = highest(scores, count)
    return Ranked(ids.tolist(), values.tolist())


def highest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`ranked` as tensors, ids int64 [n, count] and their scores, without waiting for the device; `count` is at most V.

    Exact: the best tokens lie in the blocks with the best maxima."""
    rows, vocab_size = scores.shape
    if vocab_size % _BLOCK or vocab_size < _BLOCK * count:
        found = torch.topk(scores, count)
        return found.indices, found.values
    blocks = scores.view(rows, vocab_size // _BLOCK, _BLOCK)
    chosen = torch.topk(blocks.amax(-1), count).indices.sort(-1).values
    inside = blocks.gather(1, chosen[..., None].expand(rows, count, _BLOCK)).reshape(rows, -1)
    found = torch.topk(inside, count)
    return chosen.gather(1, found.indices // _BLOCK) * _BLOCK + found.indices % _BLOCK, found.values
