"""Guesses from what requests said before: whom they reach, how many tokens they have, and that they change none."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from msgspec.structs import replace

from ssd.config.engine import EngineConfig
from ssd.config.params import Mode, SamplingParams, Speculation
from ssd.errors import UsageError
from ssd.execution.pages import PagePool, PageTable
from ssd.execution.static import StaticRunner
from ssd.ipc.messages import Submit
from ssd.ipc.public import Message
from ssd.verifier.breaker import UNSEEN_S
from ssd.verifier.misses import GuessedTokens, MissCosts, MissPolicy, ModelFree
from ssd.verifier.proposer import Result
from ssd.verifier.sequence import Sequence
from ssd.verifier.suffix_memory import SuffixMemory
from tests.draft.audit import World, plainly
from tests.draft.pair import PAGE_SIZE, Clock, Draft, Pair, config, params, use_clock
from tests.models import tiny

SIZE = 2**20
TEXT = tiny.token_ids(60, 5)


def sequence(
    request: int, tokens: list[int], salt: str = "", owner: str = "", store: bool = True, k: int = 0, most: int = 1000
) -> Sequence:
    asked = Speculation("ngram", k)
    sampling = SamplingParams(max_tokens=most, seed=0, cache_salt=salt, store=store)
    submit = Submit(request, tokens, sampling, owner)
    return Sequence(submit, asked, 2000, PageTable(PagePool(8, 4)), 0.0)


def free() -> Callable[[int], float]:
    return lambda more: 0.01 * more


def dear() -> Callable[[int], float]:
    return lambda more: 1.0 * more


def remembering(world: World, settings: EngineConfig, memory: SuffixMemory, **how: bool) -> Pair:
    """A pair with a memory, in which one more token to verify costs little."""
    pair = Pair(settings, world.target, Draft(settings, world.draft), memory=memory, **how)
    pair.proposer._costs.pricing = free  # type: ignore[method-assign]
    return pair


def told(memory: SuffixMemory, tokens: list[int], salt: str = "", owner: str = "", store: bool = True) -> None:
    """A request comes and goes."""
    known = sequence(1000, tokens, salt, owner, store)
    memory.guess(known, free)
    memory.release([known])


@pytest.mark.parametrize(
    ("salt", "owner"), [("", ""), ("a", ""), ("", "ann"), ("", "bob"), ("a", "ann"), ("', 'b", ""), ("b", "'")]
)
def test_only_requests_of_one_key_and_salt_help_each_other(salt: str, owner: str) -> None:
    memory = SuffixMemory(SIZE)
    told(memory, TEXT)
    asked = sequence(1, TEXT[:40], salt, owner)
    guess = memory.guess(asked, free)
    if (salt, owner) == ("", ""):
        assert guess is not None and guess.tokens == TEXT[40 : 40 + len(guess.tokens)]
    else:
        assert guess is None


def test_a_request_that_opts_out_is_neither_kept_nor_helped() -> None:
    memory = SuffixMemory(SIZE)
    told(memory, TEXT, store=False)
    assert memory.guess(sequence(1, TEXT[:40]), free) is None
    told(memory, TEXT)
    assert memory.guess(sequence(2, TEXT[:40]), free) is not None
    assert memory.guess(sequence(3, TEXT[:40], store=False), free) is None


def test_a_running_request_helps_another() -> None:
    memory = SuffixMemory(SIZE)
    first, second = sequence(1, TEXT[:40]), sequence(2, TEXT[:40])
    memory.guess(first, free)
    first.tokens += TEXT[40:60]
    memory.guess(first, free)
    guess = memory.guess(second, free)
    assert guess is not None and guess.tokens[:2] == TEXT[40:42]


def test_an_answer_helps_a_request_after_it() -> None:
    """The last tokens come with the release alone."""
    memory = SuffixMemory(SIZE)
    ended = sequence(1, TEXT[:20])
    memory.guess(ended, free)
    ended.tokens += TEXT[20:]
    memory.release([ended])
    assert guessed(memory, sequence(2, TEXT[:50]))[:2] == TEXT[50:52]


def test_a_request_that_lost_its_pages_begins_again() -> None:
    memory = SuffixMemory(SIZE)
    lost = sequence(1, TEXT[:30])
    memory.guess(lost, free)
    memory.release([lost])
    lost.tokens += TEXT[30:40]
    memory.guess(lost, free)
    memory.release([lost])
    assert guessed(memory, sequence(2, TEXT[:35]))[:2] == TEXT[35:37]


def guessed(memory: SuffixMemory, row: Sequence) -> list[int]:
    guess = memory.guess(row, free)
    assert guess is not None
    return list(guess.tokens)


def follow(memory: SuffixMemory, row: Sequence, truth: list[int], pricing: Callable[[], Callable[[int], float]]) -> int:
    """Let a row write `truth`, a token a round; return the length of the last guess."""
    for token in truth:
        memory.guess(row, pricing)
        row.tokens.append(token)
    guess = memory.guess(row, pricing)
    return 0 if guess is None else len(guess.tokens)


def test_the_length_follows_from_how_often_guesses_were_right() -> None:
    """One long match is proposed whole once such matches were right; it is not proposed where they were wrong."""
    memory, wrong = SuffixMemory(SIZE), SuffixMemory(SIZE)
    text = tiny.token_ids(600, 1)
    told(memory, text)
    assert follow(memory, sequence(1, text[:40]), text[40:400], dear_but_possible) == 16
    told(wrong, text)
    for request in range(2, 80):
        start = 5 * request
        follow(wrong, sequence(request, text[start : start + 40]), [1, 2, 3], dear_but_possible)
    assert wrong.guess(sequence(1, text[:40]), dear_but_possible) is None


def dear_but_possible() -> Callable[[int], float]:
    return lambda more: 0.3 * more


@pytest.mark.parametrize(("k", "most", "expected"), [(0, 1000, 16), (4, 1000, 4), (0, 8, 7), (0, 1, 0)])
def test_no_more_is_guessed_than_a_row_may_verify(k: int, most: int, expected: int) -> None:
    memory = SuffixMemory(SIZE)
    told(memory, TEXT)
    guess = memory.guess(sequence(1, TEXT[:40], k=k, most=most), lambda: lambda more: 0.0)
    assert (0 if guess is None else len(guess.tokens)) == expected


def test_a_guess_that_is_not_worth_its_price_is_none() -> None:
    memory = SuffixMemory(SIZE)
    told(memory, TEXT)
    assert memory.guess(sequence(1, TEXT[:40]), dear) is None


def test_what_was_not_verified_teaches_too() -> None:
    memory = SuffixMemory(SIZE)
    text = tiny.token_ids(600, 2)
    told(memory, text)
    assert memory.guess(sequence(1, text[:40]), lambda: lambda more: 0.97 * more) is None
    assert follow(memory, sequence(2, text[:40]), text[40:500], lambda: lambda more: 0.97 * more) > 0


@pytest.mark.parametrize("mode", ["ngram", "sd", "ssd", "auto"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_are_those_of_plain_decoding(world: World, mode: Mode, temperature: float) -> None:
    """In each mode, when all is known already: with more tokens a round than without."""
    speculation = Speculation(mode, 0 if mode == "auto" else 3, (), "jit")
    settings = config(speculation)
    memory = SuffixMemory(SIZE)
    prompts = [tiny.token_ids(12, n) for n in range(3)]
    plain = plainly(world, prompts, temperature, 40)
    rounds = []
    for _ in range(2):
        pair = remembering(world, settings, memory)
        texts = pair.run(prompts, params(len(prompts), 40, temperature))
        assert texts.ids == plain.ids
        rounds.append([metrics.rounds for metrics in texts.metrics])
    assert all(again < before for before, again in zip(*rounds, strict=True))


@pytest.mark.parametrize("elastic", [True, False])
def test_a_draft_on_the_targets_cores_hears_of_an_outcome_with_the_launch_of_a_guess(
    world: World, elastic: bool
) -> None:
    """In turn: so it does not read the text on cores with which the target verifies it."""
    settings = config(Speculation("sd", 3))
    memory, prompts = SuffixMemory(SIZE), [tiny.token_ids(12, 7)]
    plain = plainly(world, prompts, 0.0, 60)
    for _ in range(2):
        pair = remembering(world, settings, memory, elastic=elastic)
        said = noted(pair)
        assert pair.run(prompts, params(1, 60)).ids == plain.ids
    assert ("verified Outcomes Launched" in " ".join(said)) == elastic
    assert said.count("Outcomes") >= said.count("Launched") > 3


def noted(pair: Pair) -> list[str]:
    """The names of the draft's messages, and when the target has read a verification."""
    said, outcomes = list[str](), pair.proposer.outcomes

    def post(message: Message) -> bool:
        said.append(type(message).__name__)
        return pair.deliver(message)

    def after(results: Any) -> None:
        outcomes(results)
        said.append("verified")

    pair.post, pair.proposer.outcomes = post, after  # type: ignore[method-assign]
    return said


def test_a_row_that_leaves_its_draft_before_the_launch_tells_it_nothing_late(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Its plan changes between outcome and launch, again and again: no message contradicts what the draft knows."""
    settings = config(Speculation("auto"))
    memory, prompts = SuffixMemory(SIZE), [tiny.token_ids(12, 7)]
    told(memory, [*prompts[0], *(plain := plainly(world, prompts, 0.0, 80)).ids[0]])
    pair = remembering(world, settings, memory, elastic=True)
    rounds = count()

    def planned(row: Sequence, _: object) -> Speculation:
        in_turn = replace(row.asked, mode="sd", num_speculative_tokens=2)
        return in_turn if next(rounds) % 3 else replace(row.asked, mode="ngram")

    pair.proposer.plans.planned = planned  # type: ignore[method-assign]
    assert pair.run(prompts, params(1, 80)).ids == plain.ids
    assert "goes on without a draft" not in caplog.text


def test_a_draft_that_is_not_asked_while_the_memory_helps_is_not_given_up(world: World) -> None:
    """In turn such a draft shows nothing, for longer than the breaker allows to one that is asked."""
    settings = config(Speculation("sd", 3))
    memory, prompts = SuffixMemory(SIZE), [tiny.token_ids(12, 7)]
    told(memory, [*prompts[0], *(plain := plainly(world, prompts, 0.0, 150)).ids[0]])
    pair = remembering(world, settings, memory)
    clock, states = Clock(), list[str]()

    def later() -> None:
        clock.sleep(0.5)
        states.append(pair.proposer.state)

    pair.between_steps = later
    use_clock(clock)
    try:
        texts = pair.run(prompts, params(1, 150))
    finally:
        use_clock(time)
    assert texts.ids == plain.ids and texts.metrics[0].accepted_by_source["memory"] > 100
    assert len(states) > 2 * UNSEEN_S and {*states[1:]} == {"up"}


def test_other_seeds_get_their_own_tokens(world: World) -> None:
    """A remembered text is no answer: each request draws its own."""
    settings = config(Speculation("ngram"))
    memory, prompts = SuffixMemory(SIZE), [tiny.token_ids(12, 1)] * 3
    plain = plainly(world, prompts, 0.8, 40)
    for _ in range(2):
        texts = Pair(settings, world.target, Draft(settings, world.draft), memory=memory).run(
            prompts, params(3, 40, 0.8)
        )
        assert texts.ids == plain.ids
    assert len({tuple(ids) for ids in plain.ids}) == 3


def test_a_memory_without_room_is_refused() -> None:
    with pytest.raises(UsageError, match="--suffix-memory is 0, or at least 65536 bytes, not 1000"):
        config(Speculation("ngram"), suffix_memory=1000)
    assert SuffixMemory.of(config(Speculation("ngram"), suffix_memory=0)) is None


@pytest.mark.parametrize("skipped", [0, 22])
def test_a_row_that_the_memory_helps_is_not_overlapped(world: World, skipped: int) -> None:
    """Its next tokens depend on the outcome. It is overlapped again where the memory knows nothing."""
    settings, prompts = config(Speculation("ssd", 3, (2,), "none"), num_pages=100), [tiny.token_ids(12, 1)]
    plain = plainly(world, prompts, 0.0, 60)
    memory = SuffixMemory(SIZE)
    told(memory, [*prompts[0], *plain.ids[0]][skipped:])
    target = StaticRunner(world.target.model, 100, PAGE_SIZE, most_rows=3, longest=20)
    pair = Pair(settings, target, Draft(settings, world.draft), overlap=True, memory=memory)
    pair.proposer._costs.pricing = free  # type: ignore[method-assign]
    texts = pair.run(prompts, params(1, 60))
    assert texts.ids == plain.ids and texts.metrics[0].accepted_by_source["memory"] > 20


class Wanting(MissPolicy):
    """A plugin that says nothing of its gain, or that is never asked, or whose base has asked nothing."""

    def __init__(self, decides_later: bool) -> None:
        self.decides_later, self.asked = decides_later, 0

    def propose(self, row: Sequence, costs: MissCosts) -> list[int]:
        self.asked += 1
        return [1]

    def depths(self, rows: Any, costs: MissCosts) -> dict[int, int]:
        self.asked += 1
        return {}


class Own(ModelFree):
    def __init__(self) -> None:
        super().__init__(None)

    def propose(self, row: Sequence, costs: MissCosts) -> list[int]:
        return []

    def note(self, request: int, drafted: int, tokens: Any) -> None:
        pass


@pytest.mark.parametrize("policy", [Wanting(True), Wanting(False), Own()])
def test_the_memory_lives_with_policies_of_others(world: World, policy: MissPolicy) -> None:
    """Tokens of a policy that says nothing of their gain come first; one that never decides is not asked."""
    settings, prompts = config(Speculation("ssd", 3, (), "jit")), [tiny.token_ids(12, 3)]
    plain = plainly(world, prompts, 0.0, 60)
    memory = SuffixMemory(SIZE)
    told(memory, [*prompts[0], *plain.ids[0]])
    pair = remembering(world, settings, memory)
    pair.proposer._policies._policies["ssd", "jit"] = policy
    texts = pair.run(prompts, params(1, 60))
    assert texts.ids == plain.ids
    remembered = texts.metrics[0].accepted_by_source.get("memory", 0)
    if isinstance(policy, Wanting):
        assert (policy.asked > 0) == policy.decides_later and (remembered > 20 or policy.asked)
    else:
        assert remembered > 20


def test_a_preempted_text_is_kept_once() -> None:
    memory = SuffixMemory(SIZE)
    row = sequence(1, tiny.token_ids(3000, 1))
    for _ in range(5):
        memory.guess(row, free)
        memory.release([row])
    assert memory._store.struct.next - memory._store.struct.blocks - 1 <= 3000 / 64 + 1 + 4 * 2


def test_a_long_prompt_is_added_over_several_rounds() -> None:
    """No round of all rows waits for all of it. Until then there is no guess."""
    memory = SuffixMemory(8 * SIZE)
    text = [n % 30_011 * 7 % 29_989 for n in range(30_000)]
    told(memory, text)
    row = sequence(1, [5, *text[:20_000]])
    row.max_model_len = 10**6
    guesses = [memory.guess(row, free) is not None for _ in range(4)]
    assert guesses == [False, False, True, True]


def test_a_guess_takes_the_place_of_a_hit_that_would_bring_less(world: World) -> None:
    """In `ssd`, with a draft that has prepared something for most outcomes."""
    settings, prompts = config(Speculation("ssd", 2, (3,), "none")), [tiny.token_ids(12, 3)]
    memory = SuffixMemory(SIZE)
    found = []
    for _ in range(2):
        pair = remembering(world, settings, memory)
        found.append(pair.run(prompts, params(1, 60)).metrics[0])
    first, again = found
    assert first.accepted_by_source["draft"] > 0 and first.hits > 5
    assert again.accepted_by_source["memory"] > again.accepted_by_source.get("draft", 0)
    assert again.hits < first.hits and again.mean_acceptance_length_on_hit <= 3


def test_no_guess_takes_the_place_of_tokens_that_the_ratio_rule_must_test(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cascade their number depends on the tokens themselves. A choice by it would bias what is emitted."""
    asked = Speculation("ssd", 2, (3,), "none", sampler="rejection")
    settings, prompts, memory = config(asked), [tiny.token_ids(12, 3)], SuffixMemory(SIZE)
    monkeypatch.setattr(MissCosts, "draft_gain", lambda self, drafted: -1.0)  # every guess seems better
    kept, guesses = 0, 0
    for _ in range(2):
        pair = remembering(world, settings, memory)
        choose = pair.proposer._better_guess

        def watched(memory: SuffixMemory, result: Result, choose: Any = choose) -> GuessedTokens | None:
            nonlocal kept, guesses
            before = list(result.sequence.proposal)
            guess: GuessedTokens | None = choose(memory, result)
            assert result.sequence.proposal == before and (guess is None or not before)
            kept, guesses = kept + bool(before), guesses + (guess is not None)
            return guess

        monkeypatch.setattr(pair.proposer, "_better_guess", watched)
        pair.run(prompts, params(1, 60, 0.2))
    assert kept > 5 and guesses
