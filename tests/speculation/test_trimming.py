"""Draft tokens that are dropped before they are verified: what each rule emits then, in the numbers of
docs/exactness.md. Two tokens, A and B; the target says A with probability .7, the draft with .5."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

from ssd.law import Law
from ssd.speculation.acceptance import coupled
from ssd.speculation.noise import Stream, gumbel, stream_seed
from ssd.speculation.rules import RULES, VerifiedRow
from ssd.speculation.sampling import argmax
from tests.speculation.test_rejection import Tokens, decisions

A, B = 0, 1
P = torch.tensor([0.7, 0.3], dtype=torch.float64)
Q = torch.tensor([0.5, 0.5], dtype=torch.float64)
AFTER = {A: torch.tensor([0.9, 0.1], dtype=torch.float64), B: torch.tensor([0.5, 0.5], dtype=torch.float64)}
"""What the draft says after A, of which it is sure, and after B."""

Trim = Callable[[Tokens], Tokens]
TRIMS: dict[str, tuple[Trim, float]] = {
    "no token": (lambda drafted: drafted, 0.7),
    "B": (lambda drafted: drafted if drafted[0] == A else (), 0.85),
    "all, if the later token is not sure": (lambda drafted: drafted if AFTER[drafted[0]].max() > 0.6 else (), 0.85),
    "the later token, if the draft is not sure of it": (
        lambda drafted: drafted[: 1 + bool(AFTER[drafted[0]].max() > 0.6)],
        0.7,
    ),
    "the later token, always": (lambda drafted: drafted[:1], 0.7),
    "both, always": (lambda drafted: (), 0.7),
}
"""What is dropped, and the probability of A as the first token under the ratio rule."""


def drafted_pairs() -> list[tuple[Tokens, float]]:
    """Every speculation of two tokens, with its probability."""
    return [((first, second), float(Q[first] * AFTER[first][second])) for first, second in product((A, B), repeat=2)]


@pytest.mark.parametrize("name", TRIMS)
def test_the_ratio_rule_allows_no_choice_by_a_token_that_it_must_test(name: str) -> None:
    """By enumeration in fp64: A comes with probability .85 where a drawn token, or what follows it, decides."""
    trim, expected = TRIMS[name]
    found = 0.0
    for drafted, chance in drafted_pairs():
        kept = trim(drafted)
        q = torch.stack([Q, AFTER[drafted[0]]])[: len(kept)] if kept else None
        for share, emitted, last in decisions(kept, q, P.expand(len(kept) + 1, 2)):
            found += chance * share * (float(last[A]) if not emitted else float(emitted[0] == A))
    assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", TRIMS)
def test_coupled_emits_the_target_s_token_whatever_is_dropped(name: str) -> None:
    """The target draws before anyone looks at the speculation: every pair of draws, weighted, gives .7."""
    trim, _ = TRIMS[name]
    found = 0.0
    for own in product((A, B), repeat=3):
        weight = float(P[list(own)].prod())
        for drafted, chance in drafted_pairs():
            kept = trim(drafted)
            accepted, token = coupled(kept, own)
            emitted = (*kept[:accepted], token)
            assert emitted == own[: accepted + 1]
            found += weight * chance * (emitted[0] == A)
    assert found == pytest.approx(0.7, abs=1e-12)


@pytest.mark.parametrize(("sampler", "expected"), [("coupled", 0.7), ("rejection", 0.85)])
def test_the_rules_of_requests_say_the_same(sampler: str, expected: float) -> None:
    """With noise as target and draft draw it, for 4,000 seeds. A draft that shares the noise is dropped likewise."""
    rule, law, count, said = RULES[sampler], Law(1.0), 4000, 0
    logits = P.log().float().expand(2, 2)
    for seed in range(count):
        own = [
            argmax(logits[:1] + gumbel(rule.sampled_by(law.with_seed(seed)).seed, place, 2)[None])[0]
            for place in (5, 6)
        ]
        stream = Stream.SHARED if rule.shares_noise else Stream.DRAFT
        drafted = argmax(Q.log().float()[None] + gumbel(stream_seed(seed, stream), 5, 2)[None])
        kept = TRIMS["B"][0](tuple(drafted))
        if not kept or rule.emits_samples:
            accepted, token = coupled(kept, own)
        else:
            row = VerifiedRow(logits, law.with_seed(seed), [5, 6], Q.float()[None], lambda s, p: gumbel(s, p, 2))
            accepted, token = rule.outcome(kept, own, row)
        said += (*kept[:accepted], token)[0] == A
    assert abs(said / count - expected) < 5 * (expected * (1 - expected) / count) ** 0.5
