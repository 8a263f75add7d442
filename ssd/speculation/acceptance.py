"""The verification outcome (k, t*) of a speculation (ALGORITHM 1, 6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Outcome(NamedTuple):
    """`accepted` draft tokens (0..K) and the bonus `token` that the target emits after them."""

    accepted: int
    token: int


def coupled(speculation: Sequence[int], own: Sequence[int]) -> Outcome:
    """Accept while the draft token equals the target's own sample; the first difference is the bonus token.

    `own` holds the target's samples y_1..y_{d+1} for the positions of the d speculated tokens and the one after.
    Greedy decoding is the same rule with argmax as the sample. The emitted tokens are `own[: accepted + 1]`, whatever
    the speculation was: that is the whole proof of exactness (Daliri, Musco, Suresh, arXiv 2408.07978).
    """
    for accepted, (guess, sample) in enumerate(zip(speculation, own, strict=False)):
        if guess != sample:
            return Outcome(accepted, sample)
    return Outcome(len(speculation), own[len(speculation)])


def coupled_rows(speculations: Tensor, drafted: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """`coupled` for several rows where they lie, without waiting for the device; accepted and bonus tokens, both [n].

    Of `speculations` [n, K] the first `drafted` [n] tokens of a row count, of `own` [n, K + 1] as many and one more.
    """
    places = torch.arange(speculations.shape[1], device=own.device)
    right = (speculations == own[:, :-1]) & (places < drafted[:, None])
    accepted = right.long().cumprod(-1).sum(-1)
    return accepted, own.gather(1, accepted[:, None])[:, 0]


def rejection(
    speculation: Sequence[int],
    q: Tensor | None,
    p: Tensor,
    uniforms: Sequence[float],
    sample: Callable[[int, Tensor], int],
) -> list[int] | None:
    """The ratio rule (Leviathan et al., arXiv 2211.17192): the tokens that a verification emits where a speculated
    token is rejected, the accepted ones before it included; None where all are accepted.

    `q` [d, V] are the laws that the d speculated tokens were drawn from, exactly; None: they were not drawn at all (an
    n-gram, a greedy draft), which is a law with all its mass on the token. `p` [>= d, V] are the target's laws,
    `uniforms` d numbers in [0, 1), and `sample(i, weights)` draws from unnormalised `weights` [V] for position i.
    """
    for i, token in enumerate(speculation):
        if uniforms[i] * (1.0 if q is None else float(q[i, token])) < float(p[i, token]):
            continue
        weights = residual(p[i], None if q is None else q[i], token)
        if bool((weights > 0).any()):  # else p and q are equal but for rounding
            return [*speculation[:i], sample(i, weights)]
    return None


def residual(p: Tensor, q: Tensor | None, token: int) -> Tensor:
    """max(p - q, 0) [V], not normalised: the law after `token` ~ q was rejected. Without q: p without the token."""
    if q is not None:
        return (p - q).clamp_min_(0)
    weights = p.clone()
    weights[token] = 0
    return weights
