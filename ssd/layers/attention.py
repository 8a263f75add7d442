"""Attention in plain torch, on any device: over cached keys and values, and as parts that merge into one softmax."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Scores:
    """A layer's scores: q.k * `scale`, bounded by `softcap` with a tanh, for the last `window` tokens.

    No `scale`: head_dim ** -0.5. A window includes the query's own token. `sinks` float32 [heads]: the score of a key
    without value that all queries see (arXiv 2309.17453)."""

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def scale_of(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale

    def capped(self, scores: Tensor) -> Tensor:
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap

    def sunk(self, out: Tensor, total: Tensor) -> Tensor:
        """Return the output [n, heads, dim] of a softmax with log-sum-exp `total` over keys alone, beside the sinks.

        The keys' weight is exp(total) / (exp(total) + exp(sink)) = sigmoid(total - sink)."""
        if self.sinks is None:
            return out
        return out * torch.sigmoid(total - self.sinks).unsqueeze(-1).to(out.dtype)

    def reach(self, queries: int, length: int) -> int:
        return length if self.window is None else min(length, queries - 1 + self.window)


PLAIN = Scores()


def sinks_of(weight: Tensor) -> Tensor:
    return weight.to(torch.promote_types(weight.dtype, torch.float32)).contiguous()


# Scores that are computed at a time: 4 MiB as float32, or more for few queries, whose products are still fast. Memory
# for the scores of all queries would grow with the sequence.
MOST_SCORES, _FEW_QUERIES = 2**20, 32
_ROUND = 256  # the numbers of queries and keys in whole prompt chunks are multiples of this


class CachePlaces(NamedTuple):
    """`keys` and `values` [slots, kv_heads, head_dim] of a layer, and the slot of each token's own, int64 [n].

    Once they are stored, `attend` maps queries [n, heads, head_dim] and a rule to [n, heads * head_dim]."""

    keys: Tensor
    values: Tensor
    slots: Tensor
    attend: Callable[[Tensor, Scores], Tensor]


@lru_cache(maxsize=64)
def causal_mask(queries: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a mask [queries, 1, queries] for the last keys of a row: 0 where key j <= query i, else -inf."""
    mask = torch.full((queries, queries), -torch.inf, device=device, dtype=dtype).triu(1)
    return mask[:, None, :]


def minus_infinity(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


def very_low(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that is very low where `hidden`, not -inf: a softmax over hidden keys alone is not NaN."""
    low = torch.finfo(dtype).min / 2
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, low)


def is_narrow(x: Tensor) -> bool:
    # oneDNN compiles and keeps a product for each shape (1.2 MB each).
    return x.is_cpu and x.dtype.itemsize == 2


def wide(*inputs: Tensor) -> Iterator[Tensor]:
    return (each.float() if is_narrow(each) else each for each in inputs)


def group(q: Tensor, kv_heads: int) -> Tensor:
    """Put queries that share a key head in one matrix: [n, heads, dim] -> [kv_heads, n * heads / kv_heads, dim]."""
    n, heads, dim = q.shape
    return q.view(n, kv_heads, heads // kv_heads, dim).transpose(0, 1).reshape(kv_heads, -1, dim)


def ungroup(out: Tensor, n: int) -> Tensor:
    """Undo `group`, with heads flattened: [kv_heads, n * repeat, dim] -> [n, heads * dim]."""
    kv_heads, _, dim = out.shape
    return out.view(kv_heads, n, -1, dim).transpose(0, 1).reshape(n, -1)


def attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, rule: Scores = PLAIN) -> Tensor:
    """Compute causal attention of the last n tokens of a sequence; return [n, heads * dim].

    q [n, heads, dim]; keys and values [length, kv_heads, dim]. With a window, keys that no query sees may be left out.
    """
    (n, heads, _), length, dtype = q.shape, keys.shape[0], q.dtype
    if n == 1 and rule.window is None and rule.softcap is None and rule.sinks is None and is_narrow(q):
        return attend_each(q, keys[None], values[None], scale, q.new_zeros(1, 1, 1, length))
    if n % _ROUND or length % _ROUND:  # multiples of it are few shapes, which oneDNN may keep
        q, keys, values = wide(q, keys, values)
    most = max(_FEW_QUERIES, MOST_SCORES // (heads * length))
    if n <= most:
        return _attend(q, keys, values, scale, rule).to(dtype)
    # Results are allocated before the scores: between these they would leave gaps too small for the next ones.
    result = q.new_empty(n, heads * q.shape[2], dtype=dtype)
    for start in range(0, n, most):
        part, stop = slice(start, start + most), length - n + min(n, start + most)
        result[part] = _attend(q[part], keys[:stop], values[:stop], scale, rule)
    return result


def _attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, rule: Scores) -> Tensor:
    n = q.shape[0]
    length, kv_heads = rule.reach(n, keys.shape[0]), keys.shape[1]
    if length < keys.shape[0]:
        keys, values = keys[keys.shape[0] - length :], values[values.shape[0] - length :]
    queries = group(q * scale, kv_heads)
    scores = rule.capped(torch.bmm(queries, keys.permute(1, 2, 0)))
    if n > 1:
        rows = scores.view(kv_heads, n, -1, length)
        rows[..., length - n :] += causal_mask(n, q.device, q.dtype)
        if rule.window is not None and length > rule.window:
            behind = torch.ones(n, length, dtype=torch.bool, device=q.device).tril(length - n - rule.window)
            rows += minus_infinity(behind, q.dtype)[:, None]
    if rule.sinks is not None:
        sinks = rule.sinks.view(kv_heads, 1, -1).to(scores.dtype).expand(-1, n, -1)
        scores = torch.cat((scores, sinks.reshape(kv_heads, -1, 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :length]
    return ungroup(torch.bmm(weights, values.transpose(0, 1)), n)


def attend_each(q: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor) -> Tensor:
    """Compute attention of one query of each of n sequences; return [n, heads * dim].

    q [n, heads, dim], keys and values [n, length, kv_heads, dim]; `mask` [n, 1, 1, length] is added to the scores."""
    n, heads, dim = q.shape
    kv_heads = keys.shape[2]
    queries = q.view(n, kv_heads, heads // kv_heads, dim)  # queries that share a key head take the place of positions
    out = F.scaled_dot_product_attention(
        queries, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask, scale=scale
    )
    return out.reshape(n, heads * dim)


def attend_part(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None, rule: Scores = PLAIN
) -> tuple[Tensor, Tensor]:
    """Compute attention of n queries over shared keys, as a part of a larger softmax (see `merge`).

    q [n, heads, dim], keys and values [length, kv_heads, dim]; `mask` [n, 1, m] is added to the scores of the last m
    keys, and hides what a window hides. Returns output [n, heads, dim] and log-sum-exp [n, heads], without sinks."""
    (n, heads, dim), dtype = q.shape, q.dtype
    length, kv_heads, _ = keys.shape
    q, keys, values = wide(q, keys, values)
    if n > (most := max(_FEW_QUERIES, MOST_SCORES // (heads * length))):
        outs, totals = q.new_empty(n, heads, dim, dtype=dtype), q.new_empty(n, heads)
        for start in range(0, n, most):
            part = slice(start, start + most)
            own = None if mask is None else mask[part]
            outs[part], totals[part] = attend_part(q[part], keys, values, scale, own, rule)
        return outs, totals
    scores = rule.capped(torch.bmm(group(q * scale, kv_heads), keys.permute(1, 2, 0))).view(kv_heads, n, -1, length)
    if mask is not None:
        scores[..., length - mask.shape[-1] :] += mask
    total = torch.logsumexp(scores, dim=-1, keepdim=True)
    weights = torch.exp(scores - total).view(kv_heads, -1, length)
    out = ungroup(torch.bmm(weights, values.transpose(0, 1)), n).view(n, heads, dim)
    return out.to(dtype), total.squeeze(-1).transpose(0, 1).reshape(n, heads)


def attend_own(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor, rule: Scores = PLAIN
) -> tuple[Tensor, Tensor]:
    """Compute `attend_part` with each query's own keys and values [n, length, kv_heads, dim].

    `mask` [n, 1, 1, length] is added to all scores."""
    (n, heads, dim), dtype = q.shape, q.dtype
    q, keys, values = wide(q, keys, values)
    kv_heads = keys.shape[2]
    queries = (q * scale).view(n, kv_heads, heads // kv_heads, dim)
    scores = rule.capped(queries @ keys.permute(0, 2, 3, 1)) + mask
    total = torch.logsumexp(scores, dim=-1, keepdim=True)
    out = torch.exp(scores - total) @ values.transpose(1, 2)
    return out.reshape(n, heads, dim).to(dtype), total.reshape(n, heads)


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], rule: Scores = PLAIN) -> Tensor:
    """Merge two parts (output, log-sum-exp) over disjoint sets of keys into one output [n, heads, dim].

    The first weighs exp(a) / (exp(a) + exp(b)) = sigmoid(a - b), with a and b the log-sum-exps. Sinks count once."""
    (out_a, total_a), (out_b, total_b) = first, second
    share = torch.sigmoid(total_a - total_b).unsqueeze(-1).to(out_a.dtype)
    out = torch.lerp(out_b, out_a, share)
    return out if rule.sinks is None else rule.sunk(out, torch.logaddexp(total_a, total_b))
