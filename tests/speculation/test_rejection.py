"""RELIABILITY 5, levels 1, 5 and 6 for the ratio rule: the law of what is committed is the target's.

The enumeration asks the production code on both sides of each acceptance probability, with a `sample` that hands its
weights out instead of drawing from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from ssd.law import Law
from ssd.speculation.acceptance import rejection, residual
from ssd.speculation.noise import Stream, gumbel, stream_seed, uniform
from ssd.speculation.sampling import argmax, probabilities, saguaro

Tokens = tuple[int, ...]
Laws = Callable[[Tokens], Tensor]
NEAR = 1e-6
DRAWN = -7


def random_law(vocab_size: int, seed: int, dtype: torch.dtype, impossible: Tokens = ()) -> Laws:
    """Laws that differ from prefix to prefix; the tokens `impossible` have no probability."""

    def law(prefix: Tokens) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, prefix)) % 2**31)
        weights = torch.rand(vocab_size, generator=generator, dtype=torch.float64) ** 3 + 1e-3
        weights[list(impossible)] = 0
        return (weights / weights.sum()).to(dtype)

    return law


def decisions(speculation: Tokens, q: Tensor | None, p: Tensor) -> list[tuple[float, list[int], Tensor]]:
    """(probability, emitted tokens before the last one, law of the last one): every way in which the rule can go."""
    shares = [min(1.0, float(p[i, t]) / (1.0 if q is None else float(q[i, t]))) for i, t in enumerate(speculation)]
    found = []
    for accepted in range(len(speculation) + 1):
        weight = math.prod(shares[:accepted])
        uniforms = [share * (1 - NEAR) for share in shares]
        if accepted < len(speculation):
            weight *= 1 - shares[accepted]
            uniforms[accepted] = min(shares[accepted] * (1 + NEAR), math.nextafter(1, 0))
        if weight == 0.0:
            continue
        drawn: list[tuple[int, Tensor]] = []

        def sample(index: int, weights: Tensor, drawn: list[tuple[int, Tensor]] = drawn) -> int:
            drawn.append((index, weights))
            return DRAWN

        emitted = rejection(speculation, q, p, uniforms, sample)
        if accepted == len(speculation):
            assert emitted is None
            found.append((weight, list(speculation), p[accepted]))
        else:
            assert emitted == [*speculation[:accepted], DRAWN] and [index for index, _ in drawn] == [accepted]
            found.append((weight, emitted[:-1], drawn[0][1] / drawn[0][1].sum()))
    return found


def joint_law(target: Laws, draft: Laws | None, vocab_size: int, depth: int, length: int) -> dict[Tokens, float]:
    """The law of the first `length` tokens of a loop of rounds with `depth` drafted tokens. Without a draft's law its
    tokens are 0, 1, 2, ... for certain."""
    joint: dict[Tokens, float] = {}
    texts: dict[Tokens, float] = {(): 1.0}
    while texts:
        text, weight = texts.popitem()
        if len(text) >= length:
            joint[text[:length]] = joint.get(text[:length], 0.0) + weight
            continue
        ways = product(range(vocab_size), repeat=depth) if draft else [tuple(range(depth))]
        for speculation in ways:
            prefixes = [text + speculation[:i] for i in range(depth + 1)]
            p = torch.stack([target(prefix) for prefix in prefixes])
            q = torch.stack([draft(prefix) for prefix in prefixes[:depth]]) if draft and depth else None
            chance = math.prod(float(q[i, t]) for i, t in enumerate(speculation)) if q is not None else 1.0
            if chance == 0.0:
                continue
            for share, emitted, law in decisions(speculation, q, p):
                for token, probability in enumerate(law.tolist()):
                    if probability:
                        after = (*text, *emitted, token)
                        texts[after] = texts.get(after, 0.0) + weight * chance * share * probability
    return joint


def plain_law(target: Laws, length: int) -> dict[Tokens, float]:
    joint: dict[Tokens, float] = {(): 1.0}
    for _ in range(length):
        joint = {(*t, x): w * p for t, w in joint.items() for x, p in enumerate(target(t).tolist())}
    return joint


def total_variation(one: dict[Tokens, float], other: dict[Tokens, float]) -> float:
    return sum(abs(one.get(t, 0.0) - other.get(t, 0.0)) for t in one.keys() | other.keys()) / 2


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-7)])
@pytest.mark.parametrize(("vocab_size", "depth"), [(2, 3), (3, 2), (5, 1), (8, 1)])
@pytest.mark.parametrize("draft", ["drawn", "certain", "the target", "elsewhere"])
def test_the_joint_law_is_the_targets(
    draft: str, vocab_size: int, depth: int, dtype: torch.dtype, tolerance: float
) -> None:
    target = random_law(vocab_size, 1, dtype, impossible=(vocab_size - 1,) if vocab_size > 2 else ())
    drafts: dict[str, Laws | None] = {
        "drawn": random_law(vocab_size, 2, dtype),
        "certain": None,
        "the target": target,
        "elsewhere": random_law(vocab_size, 3, dtype, impossible=(0,)),
    }
    if draft == "certain" and depth > vocab_size:
        return
    found = joint_law(target, drafts[draft], vocab_size, depth, length=depth + 1)
    assert abs(sum(found.values()) - 1) <= max(tolerance, 1e-12) * 4
    assert total_variation(found, plain_law(target, depth + 1)) <= tolerance


# -- edges ------------------------------------------------------------------------------------------------------------

P = torch.tensor([[0.5, 0.25, 0.25, 0.0]])
Q = torch.tensor([[0.25, 0.5, 0.0, 0.25]])


def never(index: int, weights: Tensor) -> int:
    raise AssertionError("nothing was to be drawn")


def last(index: int, weights: Tensor) -> int:
    return int(weights.nonzero()[-1])


def test_the_border_belongs_to_rejection() -> None:
    """u < p/q, strictly: with u = p/q accepted, tokens would be too likely, and with p = 0 possible."""
    assert rejection([1], Q, P, [0.5], last) == [2]
    assert rejection([1], Q, P, [math.nextafter(0.5, 0)], never) is None
    assert rejection([3], Q, P, [0.0], last) == [2]


def test_a_token_that_the_target_likes_better_is_always_accepted() -> None:
    assert rejection([0], Q, P, [math.nextafter(1, 0)], never) is None


def test_a_certain_proposal_is_accepted_as_often_as_the_target_likes_it() -> None:
    assert rejection([1], None, P, [0.25], last) == [2]
    assert rejection([1], None, P, [math.nextafter(0.25, 0)], never) is None
    assert residual(P[0], None, 1).tolist() == [0.5, 0.0, 0.25, 0.0]


def test_equal_laws_never_reject_whatever_rounding_does() -> None:
    """q above p by a rounding everywhere: nothing is left to draw from, and the token stands."""
    assert rejection([0], P * (1 + 2e-7), P, [math.nextafter(1, 0)], never) is None


def test_the_laws_are_not_written_to() -> None:
    p, q = P.clone(), Q.clone()
    rejection([1], q, p, [0.9], last)
    rejection([1], None, p, [0.9], last)
    assert torch.equal(p, P) and torch.equal(q, Q)


# -- streams ----------------------------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(st.integers(0, 2**63 - 1))
def test_streams_are_apart(seed: int) -> None:
    assert stream_seed(seed, Stream.SHARED) == seed
    seeds = [stream_seed(seed, stream) for stream in Stream.__members__.values()]  # aliases too
    assert len(set(seeds)) == len(seeds) == 5 and all(0 <= s < 2**63 for s in seeds)


def test_uniforms_are_uniform() -> None:
    along = [uniform(seed, position) for seed in range(100) for position in range(1000)]
    assert stats.kstest(along, "uniform").pvalue > 1e-6
    assert min(along) >= 0 and max(along) < 1
    pairs = torch.tensor([[uniform(1, i), uniform(stream_seed(1, Stream.ACCEPT), i)] for i in range(20_000)])
    assert abs(torch.corrcoef(pairs.T)[0, 1]) < 5.5 / math.sqrt(20_000)


# -- Saguaro sampling -------------------------------------------------------------------------------------------------


def test_saguaro_weights_the_prepared_tokens_by_c() -> None:
    """arXiv 2603.03251, Definition 14: C exp(z) for the F best, exp(z) for the others, normalised."""
    z = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 3.0, 1.0, 2.0]])
    weights = torch.exp(z)
    weights[0, 0] *= 0.25
    weights[1, [1, 3]] *= 0.25
    expected = weights / weights.sum(-1, keepdim=True)
    assert torch.allclose(torch.softmax(saguaro(z, [1, 2], 0.25), -1), expected, atol=1e-7)
    assert saguaro(z, [1, 2], 1.0) is z
    assert torch.softmax(saguaro(z, [1, 2], 0.0), -1)[1, [1, 3]].tolist() == [0.0, 0.0]


def test_saguaro_leaves_a_law_that_it_would_empty() -> None:
    z = torch.tensor([[2.0, -torch.inf, 1.0]])
    assert torch.equal(saguaro(z, [2], 0.0), z)


# -- sampler law ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sign", "c"),
    [(1.0, 1.0), (1.0, 0.0), (-1.0, 0.5)],
    ids=["draft near target", "draft near target, none of its favourites", "draft = -target"],
)
def test_chi_square_of_two_tokens_with_all_streams(sign: float, c: float) -> None:
    """Drawn as the two processes draw: the draft's noise, then uniforms, residual and bonus noise of their own."""
    law, count = Law(0.8), 20_000
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(2, 6, generator=generator) * 1.5
    p = probabilities(target, law)
    scaled = saguaro(sign * target[:1] / 0.8 + 0.3, [2], c)
    q = torch.softmax(scaled, -1)
    observed = torch.zeros(6, 6)
    for seed in range(count):
        streams = {stream: stream_seed(seed, stream) for stream in Stream}
        drafted = argmax(scaled + gumbel(streams[Stream.DRAFT], 0, 6))
        emitted = rejection(
            drafted,
            q,
            p,
            [uniform(streams[Stream.ACCEPT], 0)],
            lambda i, w, s=streams: argmax((w.log() + gumbel(s[Stream.RESIDUAL], i, 6))[None])[0],
        )
        first = drafted[0] if emitted is None else emitted[0]
        second = argmax(p[1:].log() + gumbel(streams[Stream.BONUS], 1, 6))[0]
        observed[first, second] += 1
    expected = torch.outer(p[0], p[1]).double() * count
    assert stats.chisquare(observed.flatten(), expected.flatten(), sum_check=False).pvalue > 1e-6
