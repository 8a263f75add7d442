"""RELIABILITY 5, level 1: the acceptance algebra by enumeration, for greedy and `coupled` alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.kernels.rounds import coupled_rows
from ssd.speculation.acceptance import Outcome, coupled

Tokens = tuple[int, ...]
Law = Callable[[Tokens], list[float]]  # prefix -> probabilities of the next token
Draft = Callable[[Tokens], Tokens]  # prefix -> speculation


def words(vocab_size: int, length: int) -> Iterator[Tokens]:
    return product(range(vocab_size), repeat=length)


@pytest.mark.parametrize("vocab_size", range(1, 6))
@pytest.mark.parametrize("depth", range(4))
def test_every_draft_against_every_sample(vocab_size: int, depth: int) -> None:
    """What is committed is the target's own samples up to and with the first difference, never less and never more."""
    for own in words(vocab_size, depth + 1):
        for draft in words(vocab_size, depth):
            accepted, token = coupled(draft, own)
            assert (*draft[:accepted], token) == own[: accepted + 1]
            assert accepted == depth or draft[accepted] != own[accepted]


def test_nothing_drafted_commits_one_token() -> None:
    assert coupled([], [7]) == Outcome(accepted=0, token=7)


def test_a_sample_that_does_not_exist_is_never_accepted() -> None:
    """-1 stands for logits that were not numbers."""
    assert coupled([5, 6], [5, -1, 3]) == Outcome(accepted=1, token=-1)


@given(st.data())
def test_rows_at_once_are_rows_one_by_one(data: st.DataObject) -> None:
    """Ragged ones, whatever stands behind their ends."""
    width, tokens = data.draw(st.integers(1, 5)), st.integers(-1, 2)

    def lists(size: int) -> list[list[int]]:
        row = st.lists(tokens, min_size=size, max_size=size)
        return data.draw(st.lists(row, min_size=len(drafted), max_size=len(drafted)))

    drafted = data.draw(st.lists(st.integers(0, width), min_size=1, max_size=6))
    drafts, own = lists(width), lists(width + 1)
    accepted, bonus = coupled_rows(torch.tensor(drafts), torch.tensor(drafted), torch.tensor(own))
    expected = [coupled(draft[:count], mine) for draft, count, mine in zip(drafts, drafted, own, strict=True)]
    assert list(zip(accepted.tolist(), bonus.tolist(), strict=True)) == expected


# -- loops over rounds ------------------------------------------------------------------------------------------------


def continuation(sample: Callable[[Tokens], int], length: int) -> Tokens:
    """Plain decoding."""
    text: Tokens = ()
    while len(text) < length:
        text += (sample(text),)
    return text


def samples_along(sample: Callable[[Tokens], int], text: Tokens, draft: Tokens) -> list[int]:
    """What a verification of `draft` after `text` sees: the target's own sample at every position of it."""
    return [sample(text + draft[:i]) for i in range(len(draft) + 1)]


def hashed_sample(vocab_size: int, seed: int) -> Callable[[Tokens], int]:
    """A target whose sample depends on the whole prefix, as with argmax or with noise fixed by the position."""
    return lambda prefix: random.Random(f"{seed}/{prefix}").randrange(vocab_size)


@pytest.mark.parametrize("seed", range(3))
def test_every_draft_in_every_round_continues_the_text_of_plain_decoding(seed: int) -> None:
    """From each prefix that plain decoding passes, each draft leads to another of its prefixes, so each loop does."""
    sample = hashed_sample(4, seed)
    truth = continuation(sample, 10)
    for done in range(7):
        for depth in range(4):
            for draft in words(4, depth):
                accepted, token = coupled(draft, samples_along(sample, truth[:done], draft))
                after = (*truth[:done], *draft[:accepted], token)
                assert after == truth[: done + accepted + 1]


@settings(max_examples=150)
@given(st.integers(2, 8), st.integers(0, 99), st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1))
def test_a_loop_with_any_drafts_writes_the_text_of_plain_decoding(
    vocab_size: int, seed: int, drafts: list[list[int]]
) -> None:
    sample = hashed_sample(vocab_size, seed)
    text: Tokens = ()
    for draft in drafts:
        accepted, token = coupled(draft, samples_along(sample, text, tuple(draft)))
        text = (*text, *draft[:accepted], token)
    assert text == continuation(sample, len(text))


# -- the law ----------------------------------------------------------------------------------------------------------


def random_law(vocab_size: int, seed: int, impossible: int = 0) -> Law:
    """Probabilities that differ from prefix to prefix; the last `impossible` tokens have none."""

    def law(prefix: Tokens) -> list[float]:
        draw = random.Random(f"{seed}/{prefix}")
        weights = [draw.expovariate(1) for _ in range(vocab_size - impossible)] + [0.0] * impossible
        return [weight / sum(weights) for weight in weights]

    return law


def plain_law(law: Law, vocab_size: int, length: int) -> dict[Tokens, float]:
    """The joint law of the first tokens in plain decoding."""
    joint: dict[Tokens, float] = {(): 1.0}
    for _ in range(length):
        joint = {(*t, x): p * law(t)[x] for t, p in joint.items() for x in range(vocab_size)}
    return joint


def speculative_law(law: Law, draft: Draft, vocab_size: int, length: int) -> dict[Tokens, float]:
    """The same in a loop of rounds: each vector of samples that may be drawn, weighted, through `coupled`."""
    joint: dict[Tokens, float] = {}
    open_texts: dict[Tokens, float] = {(): 1.0}
    while open_texts:
        text, weight = open_texts.popitem()
        if len(text) >= length:
            joint[text[:length]] = joint.get(text[:length], 0.0) + weight
            continue
        speculation = draft(text)
        laws = [law(text + speculation[:i]) for i in range(len(speculation) + 1)]
        for own in words(vocab_size, len(laws)):
            probability = weight
            for p, x in zip(laws, own, strict=True):
                probability *= p[x]
            accepted, token = coupled(speculation, own)
            after = (*text, *speculation[:accepted], token)
            open_texts[after] = open_texts.get(after, 0.0) + probability
    return joint


def best(law: Law, sign: int) -> Callable[[Tokens], int]:
    return lambda prefix: max(range(len(law(prefix))), key=lambda x: sign * law(prefix)[x])


def drafts_of(law: Law, depth: int) -> dict[str, Draft]:
    """Good, bad and useless drafts of `depth` tokens; `ragged` changes its depth from round to round."""

    def chain(sample: Callable[[Tokens], int]) -> Draft:
        def draft(text: Tokens) -> Tokens:
            chosen: Tokens = ()
            while len(chosen) < depth:
                chosen += (sample(text + chosen),)
            return chosen

        return draft

    likeliest = chain(best(law, 1))
    return {
        "likeliest": likeliest,
        "unlikeliest": chain(best(law, -1)),
        "constant": lambda text: (0,) * depth,
        "hashed": chain(hashed_sample(3, 5)),
        "ragged": lambda text: likeliest(text)[: len(text) % (depth + 1)],
    }


def total_variation(one: dict[Tokens, float], other: dict[Tokens, float]) -> float:
    return sum(abs(one.get(t, 0.0) - other.get(t, 0.0)) for t in one.keys() | other.keys()) / 2


@pytest.mark.parametrize("name", ["likeliest", "unlikeliest", "constant", "hashed", "ragged"])
@pytest.mark.parametrize(("vocab_size", "depth", "impossible"), [(4, 3, 0), (4, 2, 1), (3, 1, 0), (6, 2, 0), (8, 1, 2)])
def test_the_joint_law_is_the_targets_whatever_the_draft(
    name: str, vocab_size: int, depth: int, impossible: int
) -> None:
    law = random_law(vocab_size, seed=vocab_size + depth, impossible=impossible)
    length = depth + 2 if vocab_size <= 4 else 3
    found = speculative_law(law, drafts_of(law, depth)[name], vocab_size, length)
    assert abs(sum(found.values()) - 1) <= 1e-12
    assert total_variation(found, plain_law(law, vocab_size, length)) <= 1e-12


def committed(outcome: Outcome, draft: Sequence[int]) -> Tokens:
    return (*draft[: outcome.accepted], outcome.token)


def test_an_impossible_token_is_never_committed() -> None:
    """Although the draft proposes nothing else."""
    law = random_law(4, seed=1, impossible=1)
    possible = [[x for x in range(4) if law(prefix)[x] > 0] for prefix in ((), (3,), (3, 3))]
    for own in product(*possible):
        assert 3 not in committed(coupled((3, 3), own), (3, 3))
