"""Attention over keys and values that lie in a cache; the portable backend, plain torch on any device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """How a layer scores keys: q.k times `scale` (None: head_dim ** -0.5), brought below `softcap` in size by a tanh if
    there is one, for the last `window` tokens up to the query itself (None: for all)."""

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None

    def capped(self, scores: Tensor) -> Tensor:
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap

    def reach(self, queries: int, length: int) -> int:
        """How many of `length` keys the last so many queries see between them."""
        return length if self.window is None else min(length, queries - 1 + self.window)


PLAIN = Scores()


@lru_cache(maxsize=64)
def causal_mask(queries: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[queries, 1, queries]: 0 where key j <= query i, -inf elsewhere; for the last keys of a row."""
    mask = torch.full((queries, queries), -torch.inf, device=device, dtype=dtype).triu(1)
    return mask[:, None, :]


def minus_infinity(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask that hides what is true in `hidden`: -inf there, 0 elsewhere."""
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)


def very_low(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """As `minus_infinity`, but finite, so that a softmax over nothing but hidden keys is no NaN."""
    low = torch.finfo(dtype).min / 2
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, low)


def group(q: Tensor, kv_heads: int) -> Tensor:
    """q [n, heads, dim] -> [kv_heads, n * heads / kv_heads, dim]: the queries that share a key head in one matrix."""
    n, heads, dim = q.shape
    return q.view(n, kv_heads, heads // kv_heads, dim).transpose(0, 1).reshape(kv_heads, -1, dim)


def ungroup(out: Tensor, n: int) -> Tensor:
    """The inverse of `group`, heads flattened: [kv_heads, n * repeat, dim] -> [n, heads * dim]."""
    kv_heads, _, dim = out.shape
    return out.view(kv_heads, n, -1, dim).transpose(0, 1).reshape(n, -1)


def attend(q: Tensor, keys: Tensor, values: Tensor, scale: float, rule: Scores = PLAIN) -> Tensor:
    """Causal attention of the last n positions of a sequence: q [n, heads, dim] over keys and values
    [length, kv_heads, dim] of the whole sequence, query i standing at position length - n + i. -> [n, heads * dim].

    With a window, keys that no query sees may be left out.
    """
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
    weights = torch.softmax(scores, dim=-1)
    return ungroup(torch.bmm(weights, values.transpose(0, 1)), n)


def attend_each(q: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor) -> Tensor:
    """One query of each of n sequences: q [n, heads, dim] over keys and values [n, length, kv_heads, dim] of their own,
    `mask` [n, 1, 1, length] added to the scores. -> [n, heads * dim]."""
    n, heads, dim = q.shape
    kv_heads = keys.shape[2]
    queries = q.view(n, kv_heads, heads // kv_heads, dim)  # those that share a key head stand as its positions
    out = F.scaled_dot_product_attention(
        queries, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask, scale=scale
    )
    return out.reshape(n, heads * dim)


def attend_part(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None, rule: Scores = PLAIN
) -> tuple[Tensor, Tensor]:
    """Attention of n queries over keys that all of them share, as a part of a larger softmax.

    q [n, heads, dim], keys and values [length, kv_heads, dim]; `mask` [n, 1, m] is added to the scores of the last m
    keys, and says what a window hides. Returns the normalised output [n, heads, dim] and the log-sum-exp of the scores
    [n, heads].
    """
    n, heads, dim = q.shape
    length, kv_heads, _ = keys.shape
    scores = rule.capped(torch.bmm(group(q * scale, kv_heads), keys.permute(1, 2, 0))).view(kv_heads, n, -1, length)
    if mask is not None:
        scores[..., length - mask.shape[-1] :] += mask
    total = torch.logsumexp(scores, dim=-1, keepdim=True)
    weights = torch.exp(scores - total).view(kv_heads, -1, length)
    out = ungroup(torch.bmm(weights, values.transpose(0, 1)), n).view(n, heads, dim)
    return out, total.squeeze(-1).transpose(0, 1).reshape(n, heads)


def attend_own(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor, rule: Scores = PLAIN
) -> tuple[Tensor, Tensor]:
    """Attention of n queries, each over keys of its own: keys and values [n, length, kv_heads, dim], `mask`
    [n, 1, 1, length] added to the scores. Returns as `attend_part`."""
    n, heads, dim = q.shape
    kv_heads = keys.shape[2]
    queries = (q * scale).view(n, kv_heads, heads // kv_heads, dim)
    scores = rule.capped(queries @ keys.permute(0, 2, 3, 1)) + mask
    total = torch.logsumexp(scores, dim=-1, keepdim=True)
    out = torch.exp(scores - total) @ values.transpose(1, 2)
    return out.reshape(n, heads, dim), total.reshape(n, heads)


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """Softmax attention over the union of two disjoint sets of keys from the parts over each: [n, heads, dim].

    exp(a) / (exp(a) + exp(b)) = sigmoid(a - b) for the log-sum-exps a and b.
    """
    (out_a, total_a), (out_b, total_b) = first, second
    share = torch.sigmoid(total_a - total_b).unsqueeze(-1).to(out_a.dtype)
    return torch.lerp(out_b, out_a, share)
