"""The tokens of the mock are what its documentation says, and nothing but prompt, seed and position decides."""

from __future__ import annotations

import hashlib
import itertools
import math
from typing import Any

import pytest

from ssd.config.params import SamplingParams
from ssd.plugins.mock.oracle import LOOKAHEAD, ScriptedAnswer

VOCAB = 1000
PROMPT = [5, 17, 900]


def answer(
    prompt: list[int] = PROMPT, context: int = 2048, ends: frozenset[int] = frozenset(), **params: Any
) -> ScriptedAnswer:
    return ScriptedAnswer(prompt, SamplingParams(**{"seed": 7, "max_tokens": 64, **params}), VOCAB, context, ends)


def documented(prompt: list[int], seed: int, position: int) -> int:
    """A client's own implementation, from the docstring alone."""
    data = seed.to_bytes(8, "little") + b"".join(token.to_bytes(4, "little") for token in prompt)
    state = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
    for _ in range(3 * position + 1):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return (z ^ (z >> 31)) % VOCAB


def test_tokens_are_those_of_the_documentation() -> None:
    assert answer().whole() == ([documented(PROMPT, 7, p) for p in range(64)], "length")


def test_prompt_and_seed_decide_and_other_parameters_do_not() -> None:
    tokens, _ = answer().whole()
    assert answer(temperature=1.0, top_k=3, logprobs=2).whole()[0] == tokens
    assert answer(max_tokens=20).whole()[0] == tokens[:20]
    for other in (answer(seed=8), answer([5, 17]), answer([17, 5, 900])):
        assert sum(a != b for a, b in zip(other.whole()[0], tokens, strict=True)) > 50


@pytest.mark.parametrize("params", [{}, {"max_tokens": 1}, {"max_tokens": 7, "seed": 2**63 - 1}])
def test_rounds_make_up_the_whole(params: dict[str, Any]) -> None:
    asked, tokens, rounds = answer(**params), [], []
    while not rounds or rounds[-1].reason is None:
        rounds.append(asked.round(len(tokens)))
        tokens += rounds[-1].token_ids
    assert (tokens, rounds[-1].reason) == asked.whole()
    assert (len(rounds[0].token_ids), rounds[0].drafted, rounds[0].cache) == (1, 0, "")
    assert all(len(each.token_ids) == each.accepted + 1 for each in rounds[:-1])
    assert all((each.drafted, each.cache) == (LOOKAHEAD, "first_round") for each in rounds[1:2])


def test_rounds_are_of_every_size_and_hit_or_miss() -> None:
    rounds = [answer(seed=seed).round(9) for seed in range(400)]
    assert {each.accepted for each in rounds} == set(range(LOOKAHEAD + 1))
    assert {each.cache for each in rounds} == {"hit", "token_not_covered"}


def test_an_answer_ends_at_a_stop_token_but_not_before_min_tokens() -> None:
    tokens, _ = answer().whole()
    place = next(p for p in itertools.count(5) if tokens[p] not in tokens[:p])
    stop = tokens[place]
    until = (tokens[: place + 1], "stop")
    assert answer(stop_token_ids=(stop,)).whole() == until
    assert answer(ends=frozenset([stop])).whole() == until
    assert answer(ends=frozenset([stop]), ignore_eos=True).whole()[1] == "length"
    assert answer(stop_token_ids=(stop,), min_tokens=place + 1).whole() == until
    later, _ = answer(stop_token_ids=(stop,), min_tokens=place + 2).whole()
    assert len(later) > place + 1


def test_an_answer_ends_with_its_context() -> None:
    tokens, reason = answer(context=len(PROMPT) + 9).whole()
    assert (len(tokens), reason) == (9, "length")


@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_logprobs_are_a_law_with_the_token_on_top(top: int) -> None:
    asked = answer()
    for entry, token in zip(asked.logprobs(3, 8, top), asked.whole()[0][3:11], strict=True):
        assert entry.token_id == token
        chances = [math.exp(logprob) for _, logprob in entry.top]
        assert (len(chances), sum(chances) <= 1, chances) == (top, True, sorted(chances, reverse=True))
        assert not top or entry.top[0] == (token, entry.logprob)
        assert len({token for token, _ in entry.top}) == top


def test_prompt_logprobs_leave_out_the_first_token() -> None:
    assert [entry.token_id for entry in answer().prompt_logprobs(0)] == PROMPT[1:]
