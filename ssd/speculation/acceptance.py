"""Decides the outcome (k, t*) of a verification."""

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
    """Accepts while the draft token equals the target's own sample; the first difference is the bonus token.

    `own` holds the target's samples y_1..y_{d+1} for the positions of the d speculated tokens and the one after; a
    greedy sample is the argmax. The emitted tokens are `own[: accepted + 1]`, whatever the speculation was. That is the
    whole proof of exactness (Daliri, Musco, Suresh, arXiv 2408.07978)."""
    for accepted, (guess, sample) in enumerate(zip(speculation, own, strict=False)):
        if guess != sample:
            return Outcome(accepted, sample)
    return Outcome(len(speculation), own[len(speculation)])


def coupled_rows(speculations: Tensor, drafted: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """`coupled` for n rows on their device, without waiting for it; returns accepted and bonus tokens, both [n].

    Of a row of `speculations` [n, K] the first `drafted` [n] tokens count; of `own` [n, K + 1] one more."""
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
    """The ratio rule (Leviathan et al., arXiv 2211.17192): returns the emitted tokens if a draft token is rejected.

    They begin with the accepted tokens. Returns None if all draft tokens are accepted. The d draft tokens were drawn
    from the distributions `q` [d, V]; None: they were not drawn (an n-gram, a greedy draft), so all mass is on them.
    `p` [>= d, V] are the target's distributions, `uniforms` d numbers in [0, 1), and `sample(i, weights)` draws from
    unnormalised `weights` [V] for position i."""
    for i, token in enumerate(speculation):
        if uniforms[i] * (1.0 if q is None else float(q[i, token])) < float(p[i, token]):
            continue
        weights = residual(p[i], None if q is None else q[i], token)
        if bool((weights > 0).any()):  # else p and q are equal but for rounding
            return [*speculation[:i], sample(i, weights)]
    return None


def residual(p: Tensor, q: Tensor | None, token: int) -> Tensor:
    """Returns the weights [V] after `token` ~ q was rejected: max(p - q, 0); without q, p without the token."""
    if q is not None:
        return (p - q).clamp_min_(0)
    weights = p.clone()
    weights[token] = 0
    return weights
