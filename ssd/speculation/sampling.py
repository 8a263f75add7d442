"""Turns logits into tokens, by the same functions in all modes: they cannot differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ssd.errors import SsdError
from ssd.kernels import cpu
from ssd.kernels.cpu import Ranked
from ssd.kernels.gpu import Draws, fused, fuses
from ssd.law import DRAWN, Law
from ssd.speculation.noise import gumbel, gumbels_of, keys_of

_BLOCK = 128
_NUCLEUS = 256

UNKNOWN = -2
"""Replaces a sampled id that is not in the vocabulary, which only a faulty kernel gives."""


class Drawing(IntEnum):
    """The work of drawing a token from logits; each level includes those before it."""

    GREEDY = 0
    WARM = 1
    """Temperature and noise."""
    FILTERED = 2
    ADJUSTED = 3
    """The logits are those that requests adjust."""


def drawing_of(laws: Iterable[Law], adjusted: bool = False) -> Drawing:
    """Return the most work that any of these laws needs; `adjusted`: some logits are adjusted."""
    if adjusted:
        return Drawing.ADJUSTED
    warm = [law for law in laws if law.temperature > 0.0]
    if any(law.filters for law in warm):
        return Drawing.FILTERED
    return Drawing.WARM if warm else Drawing.GREEDY


def numbers_of(law: Law) -> tuple[float, ...]:
    """Return the numbers of a law as a device has them (`ssd.law.DRAWN`)."""
    _, *others = (getattr(law, name) for name in DRAWN)
    # In 32 bits, as a GPU divides (see `warmed`).
    inverse = float(np.float32(1.0) / np.float32(law.temperature)) if law.temperature > 0.0 else 0.0
    return inverse, *others


Noise = Callable[[int, int], Tensor]


class SampledRows(NamedTuple):
    """Rows of logits of one request: law, position of each row's token, noise to add, if any."""

    law: Law
    positions: Sequence[int]
    noise: Noise | None


def scores_of(logits: Tensor, asked: Sequence[SampledRows]) -> tuple[Tensor, cpu.Warmth | None]:
    """Return scores for `argmax` and `ranked`: a tensor, and what kernels still do with each row.

    `logits` [n, V] are those of all `asked`, in order. Kernels perturb in the pass that finds the best scores, with the
    same bits; elsewhere the tensor is `perturbed` already."""
    if all(law.temperature == 0.0 for law, _, _ in asked):
        return logits, None
    if cpu.serve(logits) and not any(law.filters or (law.temperature and noise is None) for law, _, noise in asked):
        places = [(law, position, noise) for law, positions, noise in asked for position in positions]
        return logits, [
            (law.temperature, add(law.seed, at)) if law.temperature and add else None for law, at, add in places
        ]
    rows = logits.split([len(own.positions) for own in asked])
    scores = [perturbed(part, *own) for part, own in zip(rows, asked, strict=True)]
    return scores[0] if len(scores) == 1 else torch.cat(scores), None


def perturbed(logits: Tensor, law: Law, positions: Sequence[int], noise: Noise | None) -> Tensor:
    """Return scores [n, V] in float32 whose argmax is the sample of each row of `logits` [n, V].

    Greedy scores are the logits; else filtered logits over temperature, plus the noise of (seed, `positions[i]`)."""
    if law.temperature == 0.0:
        return logits.float()
    scaled = filtered(logits.float() / law.temperature, law)
    if noise is not None:
        for row, position in zip(scaled, positions, strict=True):
            row += noise(law.seed, position)
    return scaled


def filtered(scaled: Tensor, law: Law) -> Tensor:
    """Return `scaled` [n, V], logits over temperature, with tokens outside the filters at -inf.

    Tokens as likely as the last one that a filter keeps are kept too."""
    if scaled.device.type != "cpu":
        numbers = torch.tensor((1.0, *numbers_of(law)[1:]), device=scaled.device)
        same = numbers[:, None].expand(-1, len(scaled))
        return scaled.masked_fill(scaled < lowest(scaled, same)[:, None], -torch.inf)
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
    """Return the logit of the last token of `row` [V] needed for `top_p` (Holtzman, arXiv 1904.09751)."""
    total = torch.logsumexp(row, dim=-1)
    for count in (_NUCLEUS, row.shape[-1]):  # sorting a whole vocabulary takes milliseconds
        best = torch.topk(row, min(count, row.shape[-1])).values
        short = (best - total).exp().cumsum(-1) < top_p
        if not short[-1]:
            return best[short.sum()]
    return best[-1]


def warm_up(device: torch.device) -> None:
    """Compile the kernels that sample outside of captured graphs."""
    for size in (16, 17) if fuses(device) else ():  # kernels for sizes that 16 divides differ from others
        logits, law = torch.zeros(1, size, device=device), Law(1.0, top_p=0.5)
        perturbed(logits, law, [0], lambda seed, position, size=size: gumbel(seed, position, size, device))  # type: ignore[misc]
        gumbels_of(keys_of([(0, 0)], device), size, ids=torch.arange(size, device=device))


@fused
def lowest(logits: Tensor, laws: Tensor) -> Tensor:
    """Return the lowest score of each row, float32 [n], that the filters of its law keep; -inf without filters.

    Scores are logits [n, V] over temperature; `laws` are those of `Draws`. The host does not wait for the device."""
    number = dict(zip(DRAWN, laws[..., None], strict=True))
    inverse, top_k, top_p, min_p = (number[name] for name in ("temperature", "top_k", "top_p", "min_p"))
    scores = (logits.float() * inverse).sort(-1, descending=True).values
    size = scores.shape[1]
    kth = scores.gather(1, torch.where((top_k > 0) & (top_k < size), top_k, size).long() - 1)
    least = torch.where(top_k > 0, kth, -torch.inf).maximum(scores[:, :1] + torch.log(min_p))
    left = torch.where(scores < least, -torch.inf, scores)
    # Drop a score if the scores before it reach top_p; always keep the best.
    reached = (left - left.logsumexp(-1, keepdim=True)).exp().cumsum(-1).roll(1, -1) >= top_p
    reached[:, 0] = False
    last = torch.where(reached, torch.inf, left).amin(-1, keepdim=True)
    filtering = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
    nucleus = torch.where(top_p < 1.0, last.maximum(least), least)
    return torch.where(filtering & (inverse > 0.0), nucleus, -torch.inf)[:, 0]


def probabilities(logits: Tensor, law: Law) -> Tensor:
    """Return rows of `logits` [n, V] as probabilities in float32, under a law with temperature > 0."""
    return torch.softmax(filtered(logits.float() / law.temperature, law), dim=-1)


def saguaro(scaled: Tensor, fan_outs: Sequence[int], c: float) -> Tensor:
    """Return `scaled` [n, V], the weights of each row's `fan_outs[row]` best tokens times `c`, 0 to 1.

    Saguaro sampling (arXiv 2603.03251, Definition 14). With `c` 0 a row without other tokens stays unchanged."""
    if c == 1.0:
        return scaled
    lowered = scaled.clone()
    for row, fan_out in zip(lowered, fan_outs, strict=True):
        best = torch.topk(row, min(fan_out, row.shape[-1])).indices
        row[best] += math.log(c) if c > 0.0 else -torch.inf
    empty = ~(lowered > -torch.inf).any(-1, keepdim=True)
    return torch.where(empty, scaled, lowered)


def argmax(scores: Tensor, warmth: cpu.Warmth | None = None) -> list[int]:
    """Return the id of each row's best score, lowest on a tie; -1 for a NaN or no finite maximum."""
    if cpu.serve(scores):
        return cpu.draw(scores, warmth)
    return read_ids(sound(*best(scores)), scores.shape[1])


def best(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the id of each row's best score, lowest on a tie, and the score, NaN if the row holds one."""
    rows, vocab_size = scores.shape
    if vocab_size % _BLOCK:
        largest = scores.max(-1)
        return largest.indices, largest.values
    # A reduction without indices is several times faster than `argmax` on a CPU.
    blocks = scores.view(rows, vocab_size // _BLOCK, _BLOCK)
    highest = blocks.amax(-1)
    block = highest.argmax(-1)
    inside = blocks[torch.arange(rows, device=scores.device), block].max(-1)
    return block * _BLOCK + inside.indices, inside.values


def read_ids(ids: Tensor, vocab_size: int, refuse: bool = False) -> list[Any]:
    """Return ids of any shape from a device as lists, in one copy.

    -1 means no sample; any other id outside of the vocabulary becomes `UNKNOWN`. With `refuse` both raise SsdError."""
    found = ids.cpu()
    wrong = (found < -1) | (found >= vocab_size)
    if refuse and bool((wrong | (found < 0)).any()):
        raise SsdError(f"the device gave a token id that is not in the vocabulary of {vocab_size}")
    tokens: list[Any] = found.masked_fill(wrong, UNKNOWN).tolist()
    return tokens


def sound(ids: Tensor, values: Tensor) -> Tensor:
    return torch.where(values.isfinite(), ids, -1)


@fused
def drawn(logits: Tensor, draws: Draws | None = None) -> Tensor:
    """Return `argmax(perturbed(...))` of logits [n, V], int64 [n], without waiting for the device."""
    return sound(*best(warmed(logits, draws)))


@fused
def warmed(logits: Tensor, draws: Draws | None, ids: Tensor | None = None) -> Tensor:
    """Return `perturbed` of logits [n, V] as float32, without waiting; without `draws` all are greedy.

    Column i is token `ids[i]` (int64 [V]), or i. Logits are multiplied by 1 / temperature, as a GPU divides in
    `perturbed` too: scores are equal there."""
    if draws is None:
        return logits.float()
    least = lowest(logits, draws.laws) if draws.filtered else None
    noise = gumbels_of(draws.keys, logits.shape[1], ids=ids)  # first, as it takes most memory while it is made
    scores, factor = logits.float(), draws.inverse[:, None]
    scaled = scores * factor
    if least is not None:
        scaled.masked_fill_(scaled < least[:, None], -torch.inf)
    return torch.where(factor > 0, scaled.add_(noise), scores)


def ranked(scores: Tensor, count: int, warmth: cpu.Warmth | None = None) -> Ranked:
    """Return the `count` best ids of each row and their scores, best first; ties in any order."""
    count = min(count, scores.shape[1])
    if cpu.serve(scores):
        return cpu.rank(scores, count, warmth)
    ids, values = highest(scores.float().contiguous(), count)
    return Ranked(read_ids(ids, scores.shape[1], refuse=True), values.tolist())


def highest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return `ranked` as tensors, ids int64 [n, count] and scores, without waiting; `count` <= V.

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
