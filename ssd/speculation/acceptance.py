"""Decides the outcome (k, t*) of a verification, and compares texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Outcome(NamedTuple):
    """`accepted` draft tokens (0..K) and the bonus `token` that the target emits after them."""

    accepted: int
    token: int


def common_prefix_length(one: Sequence[int], other: Sequence[int], sure: int = 0) -> int:
    """Return how many leading tokens two texts share; the first `sure` are known to be equal."""
    pairs = zip(one[sure:], other[sure : len(one)], strict=False)
    return sure + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def coupled(speculation: Sequence[int], own: Sequence[int]) -> Outcome:
    """Accept draft tokens up to the first that differs from the target's sample, the bonus token.

    `own` holds the target's samples y_1..y_{d+1}. The emitted tokens are `own[: accepted + 1]` for every speculation,
    so the output is exact (Daliri, Musco, Suresh, arXiv 2408.07978)."""
    for accepted, (guess, sample) in enumerate(zip(speculation, own, strict=False)):
        if guess != sample:
            return Outcome(accepted, sample)
    return Outcome(len(speculation), own[len(speculation)])


def rejection(
    speculation: Sequence[int],
    q: Tensor | None,
    p: Tensor,
    uniforms: Sequence[float],
    sample: Callable[[int, Tensor], int],
) -> list[int] | None:
    """Return the accepted tokens and the bonus token by the ratio rule; None if none is rejected.

    Source: Leviathan et al., arXiv 2211.17192. `q` [d, V] are the draft probabilities; None: each draft token has
    probability 1. `p` [>= d, V] are the target's distributions, `uniforms` d numbers in [0, 1). `sample(i, weights)`
    draws from unnormalised `weights` [V] for position i."""
    for i, token in enumerate(speculation):
        if uniforms[i] * (1.0 if q is None else float(q[i, token])) < float(p[i, token]):
            continue
        weights = residual(p[i], None if q is None else q[i], token)
        if bool((weights > 0).any()):  # else p and q are equal but for rounding
            return [*speculation[:i], sample(i, weights)]
    return None


def residual(p: Tensor, q: Tensor | None, token: int) -> Tensor:
    """Return the weights [V] after `token` was rejected: max(p - q, 0), or p without `token`."""
    if q is not None:
        return (p - q).clamp_min_(0)
    weights = p.clone()
    weights[token] = 0
    return weights
