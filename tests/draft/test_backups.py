"""What a row verifies after a miss: exact whatever it is, in step with the draft, and nothing if there is no backup."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
from msgspec.structs import replace

from ssd.config.params import Mode, SamplingParams, Speculation
from ssd.execution.meanwhile import Task
from ssd.execution.pages import PagePool, PageTable
from ssd.ipc.messages import Submit
from ssd.ipc.public import Metrics
from ssd.speculation import backups as speculators
from ssd.speculation.backups import SPECULATORS
from ssd.speculation.ngram import PromptLookup
from ssd.tuning.estimates import DecodingRound, DraftTelemetry, Estimates, Mean
from ssd.tuning.knowledge import Knowledge
from ssd.verifier import misses
from ssd.verifier import sequence as sequences
from ssd.verifier.misses import MissCosts, ModelFree
from ssd.verifier.proposer import Result
from tests.draft.audit import Auditor, World, plainly
from tests.draft.pair import Clock, Draft, Pair, config, params, use_clock
from tests.models import tiny

PROMPTS = [[5, 6, 7, 8] * 6, tiny.token_ids(30, 30), [9, 9, 9, 9, 9]]


@pytest.fixture(autouse=True)
def real_time() -> Iterator[None]:
    """Afterwards."""
    yield
    use_clock(time)


class Failing:
    def extend(self, tokens: Sequence[int]) -> None:
        raise RuntimeError("no idea")

    def propose(self, count: int) -> list[int]:
        return [1] * count


class Unborn(Failing):
    def __init__(self) -> None:
        raise RuntimeError("cannot be made")


class Lying(Failing):
    """More than was asked for, no ids, ids of another vocabulary."""

    def extend(self, tokens: Sequence[int]) -> None:
        self._last = tokens[-1] if tokens else 0

    def propose(self, count: int) -> list[int]:
        return [[5] * (count + 9), [3, -1, 4], [131], [2, "x", 1]][self._last % 4]  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("backup", "temperature", "steps"),
    [
        ("auto", 0.8, None),
        ("auto", 0.0, 1),
        ("jit", 0.0, 1),
        ("ngram", 0.8, None),
        ("none", 0.0, 1),
        (Failing, 0.8, None),
        (Unborn, 0.0, 1),
        (Lying, 0.0, 1),
    ],
    ids=str,
)
def test_no_backup_changes_a_token(
    world: World, backup: str | type[Failing], temperature: float, steps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the draft's cache is right after every one of its tokens, those that were not its own included. The draft is
    quick, or takes `steps` steps a round."""
    if not isinstance(backup, str):
        maker = backup
        monkeypatch.setattr(misses, "load", lambda group, name: maker if group == SPECULATORS else None)
        backup = "plugin"
    settings = config(Speculation("ssd", 4, (1,), backup))
    draft = Draft(settings, world.draft, steps=steps)
    Auditor(world, draft)
    texts = Pair(settings, world.target, draft).run(PROMPTS, params(3, 30, temperature))
    assert texts.ids == plainly(world, PROMPTS, temperature, 30).ids
    assert sum(m.misses for m in texts.metrics) > 0
    draft.assert_empty()


def test_what_was_written_before_is_proposed_without_a_draft(world: World) -> None:
    """The draft is silent; a text that repeats itself is looked up."""
    settings = config(Speculation("ssd", 4, (1,), "ngram"))
    draft = Draft(settings, world.draft, steps=0)
    texts = Pair(settings, world.single, draft).run([[9] * 12], params(1, 60))
    tokens = [*[9] * 12, *texts.ids[0]]
    repeats = sum(tokens[i - 2 : i] in [tokens[j - 2 : j] for j in range(2, i)] for i in range(13, 72))
    assert repeats > 10, "this text does not repeat itself: the test needs another prompt"
    assert texts.metrics[0].accepted_tokens > 0 and texts.metrics[0].hits == 0
    assert texts.metrics[0].accepted_by_source == {"lookup": texts.metrics[0].accepted_tokens}


def test_accepted_tokens_are_counted_by_their_source(world: World) -> None:
    """A quick draft of the target's own model, and lookups after misses: each round's tokens have one source."""
    settings = config(Speculation("ssd", 4, (1,), "ngram"))
    pair = Pair(settings, world.target, Draft(settings, world.draft))
    prompts = [[9] * 12, *PROMPTS]
    for request, (prompt, law) in enumerate(zip(prompts, params(len(prompts), 60), strict=True)):
        pair.engine.submit(Submit(request, prompt, law))
    counted: dict[int, Counter[str]] = {request: Counter() for request in range(len(prompts))}
    ends: dict[int, Metrics] = {}
    while pair.engine.busy:
        for emission in pair.engine.step():
            assert (emission.source != "") == (emission.drafted > 0)
            if emission.drafted:
                assert emission.source == ("draft" if emission.cache == "hit" else "lookup")
                counted[emission.request][emission.source] += emission.accepted
            if emission.metrics is not None:
                ends[emission.request] = emission.metrics
    for request, metrics in ends.items():
        assert metrics.accepted_by_source == +counted[request]
        assert sum(metrics.accepted_by_source.values()) == metrics.accepted_tokens
    assert all(sum(counts[source] for counts in counted.values()) for source in ("draft", "lookup"))


def test_a_draft_that_is_away_leaves_the_lookup(world: World) -> None:
    """Nobody said hello, or what is said is lost."""
    settings = config(Speculation("ssd", 4, (1,), "ngram"))
    for lost in (True, False):
        pair = Pair(settings, world.target, Draft(settings, world.draft))
        if lost:
            pair.post = lambda message: False
        else:
            pair.proposer.session.epoch, pair.proposer.session._hears = None, False
        texts = pair.run(PROMPTS, params(3, 30))
        assert texts.ids == plainly(world, PROMPTS, 0.0, 30).ids
        assert sum(m.drafted_tokens for m in texts.metrics) > 0


@pytest.mark.parametrize(
    ("asked", "planned", "expected"),
    [
        (Speculation("ssd", 0, (), "jit"), 1, 8),
        (Speculation("ssd", 2, (1,), "jit"), 2, 2),
    ],
)
def test_repeated_text_is_not_cut_short_by_what_the_draft_has_time_for(
    asked: Speculation, planned: int, expected: int
) -> None:
    submit = Submit(0, [5, 6, 7, 8, 9, 10, 11, 12] * 3, SamplingParams(max_tokens=100, seed=0, speculation=asked))
    sequence = sequences.Sequence(submit, asked, 200, PageTable(PagePool(8, 4)), 0.0)
    sequence.speculation = Speculation("ssd", planned, (1,), "ngram")
    assert ModelFree(PromptLookup).propose(sequence, priced(0.0)) == [5, 6, 7, 8, 9, 10, 11, 12][:expected]
    short = sequences.Sequence(
        replace(submit, params=SamplingParams(max_tokens=3, seed=0)), asked, 200, sequence.table, 0.0
    )
    short.speculation = sequence.speculation
    assert len(ModelFree(PromptLookup).propose(short, priced(0.0))) == 2


def test_a_row_looks_nothing_up_where_nothing_can_pay() -> None:
    submit = Submit(0, [5, 6, 7, 8, 9, 10] * 3, SamplingParams(max_tokens=100, seed=0))
    sequence = sequences.Sequence(submit, Speculation("ngram", 0, (), "jit"), 200, PageTable(PagePool(8, 4)), 0.0)
    lookup, rounds = ModelFree(), []
    for sequence.round in range(1, 33):
        rounds += [sequence.round] if not lookup.hopeless(sequence, priced(0.8)) else []
    assert rounds == [16, 32]  # to learn whether it still is so
    sequence.round = 1
    assert not lookup.hopeless(sequence, priced(0.7))
    among_others = priced(0.7)
    among_others.batch = 2
    assert lookup.hopeless(sequence, among_others)
    sequence.asked = Speculation("ngram", 4, (), "jit")
    assert not lookup.hopeless(sequence, priced(0.8))  # K was asked for


def test_a_row_whose_lookups_bring_less_than_they_cost_asks_seldom() -> None:
    """Until a text begins to repeat itself."""
    submit = Submit(0, [*range(30)], SamplingParams(max_tokens=100, seed=0))
    sequence = sequences.Sequence(submit, Speculation("ngram", 0, (), "jit"), 200, PageTable(PagePool(8, 4)), 0.0)
    lookup, asked = ModelFree(), []
    costs = priced(0.1, seconds=1 / 500)
    for sequence.round in range(1, 97):
        if not lookup.hopeless(sequence, costs):
            asked.append(sequence.round)
            lookup.propose(sequence, costs)
    assert asked[:8] == [*range(1, 9)] and asked[-3:] == [64, 80, 96]
    sequence.tokens[:] = [*range(30), *range(25)]
    lookup.propose(sequence, costs)
    sequence.round = 97
    assert not lookup.hopeless(sequence, costs)


@pytest.mark.parametrize(("brought", "expected"), [(4, 0.25), (6, 0.25), (8, 0.25), (16, 0.5)])
def test_a_token_among_others_is_worth_what_all_rows_bring(brought: int, expected: float) -> None:
    """Half where each of four rows brings one token, all where each brings two; the price follows the speed too."""
    costs = priced(0.125)
    costs.batch = 4
    costs.estimates.note(DecodingRound(4, 4, 4.0, 0.0, brought, False, False, None), DraftTelemetry(0, 0, 0.0, 0))
    assert costs.pricing()(1) == pytest.approx(expected, rel=0.1)


def priced(each: float, seconds: float = 1.0) -> MissCosts:
    """Costs of an engine that brings a token in `seconds`; one more token to verify takes `each` times as long."""
    estimates = Estimates()
    estimates.recall(Knowledge(tables={"verify": {1: seconds, 2: seconds * (1.0 + each)}}))
    estimates.note(DecodingRound(1, 1, seconds, 0.0, 1, False, False, None), DraftTelemetry(0, 0, 0.0, 0))
    return MissCosts(estimates)


def test_drafting_ends_where_a_token_is_likelier_wrong_than_worth_its_time() -> None:
    """A token takes the draft .06 s and the verification .02 s more, a second brings one token, and four of five next
    tokens are right. A draft that takes long until its first token is not more costly."""
    costs = priced(0.02)
    costs.estimates.costs.tables["step"].set(1, 0.06)
    costs.estimates.acceptance = Mean(0.8)
    costs.estimates.token_s.note(5.0)
    assert costs.least(1) == pytest.approx((0.02 + 0.06) / 0.8, rel=0.01)
    assert priced(10.0).least(1) == 1.0


def test_no_more_is_looked_up_than_is_worth_verifying() -> None:
    """The second token is right half the times the first one is, which is always."""
    submit = Submit(0, [5, 6, 7, 8, 9, 10] * 3, SamplingParams(max_tokens=100, seed=0))
    asked = Speculation("ssd", 0, (), "jit")
    sequence = sequences.Sequence(submit, asked, 200, PageTable(PagePool(8, 4)), 0.0)
    sequence.speculation = Speculation("ssd", 1, (1,), "ngram")
    proposals = ModelFree(PromptLookup)
    for _ in range(500):
        for tokens in ([5, 6], [5, 1]):
            proposals.propose(sequence, priced(0.0))
            proposals.note(0, 2, tokens)
    assert [len(proposals.propose(sequence, priced(each))) for each in (1.1, 0.6, 0.05)] == [0, 1, 8]
    # What is known of long repetitions says nothing about short ones.
    other = ModelFree(PromptLookup)
    other._chances = proposals._chances
    sequence.tokens[:] = [9, 10, 1, 2, 3, 9, 10]
    assert [len(other.propose(sequence, priced(each))) for each in (0.4, 0.2)] == [0, 4]


def test_what_was_not_verified_is_learned_from_too() -> None:
    """A guess that did not pay is compared with what came: once it is right often enough, it pays."""
    submit = Submit(0, [9, 10, 1, 2, 3, 9, 10], SamplingParams(max_tokens=100, seed=0))
    sequence = sequences.Sequence(submit, Speculation("ngram", 0, (), "jit"), 200, PageTable(PagePool(8, 4)), 0.0)
    lookup, costs = ModelFree(), priced(0.8)
    assert lookup.propose(sequence, costs) == []
    for _ in range(200):
        lookup.note(0, 0, [1])
    assert lookup.propose(sequence, costs) != []
    for _ in range(200):
        lookup.note(0, 0, [7])
    assert lookup.propose(sequence, priced(0.3)) == []


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_a_draft_that_says_nothing_is_not_waited_for_long(
    world: World, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it claims of its own speed: once, and not again before it shows progress. What there is to do meanwhile
    is done when a wait begins."""
    clock = Clock()
    use_clock(clock)
    settings = config(Speculation(mode, 16, (1,), "jit"))
    draft = Draft(settings, world.draft, steps=0)
    for claim in (0.0, 1000.0):
        draft._writer.tick(claim)
        pair = Pair(settings, world.target, draft)
        began, waits = clock.now, []
        monkeypatch.setattr(pair.proposer, "settle", partial(_settled, pair.proposer.settle, clock, waits))
        monkeypatch.setattr(pair.proposer, "outcomes", partial(_after, clock, pair.proposer.outcomes))
        assert pair.run(PROMPTS[:1], params(1, 60)).ids == plainly(world, PROMPTS[:1], 0.0, 60).ids
        assert 0 < max(waits) <= 0.21
        assert sum(wait > 0.01 for wait in waits) == 1
        assert clock.now > began


def _after(clock: Clock, outcomes: Callable[[list[Result]], None], results: list[Result]) -> None:
    """A verification takes twenty milliseconds."""
    clock.sleep(0.02)
    outcomes(results)


def _settled(
    settle: Callable[..., float], clock: Clock, waits: list[float], running: list[sequences.Sequence], meanwhile: Task
) -> float:
    began, done = clock.now, []
    waits.append(settle(running, lambda: done.append(clock.now)))
    meanwhile()
    assert waits[-1] < 0.01 or (len(done) == 1 and done[0] < began + 0.01)
    return waits[-1]


def test_names() -> None:
    assert {"auto", "jit", "ngram", "none"} <= set(speculators.names())
    assert speculators.load(SPECULATORS, "ngram") is PromptLookup and speculators.load(SPECULATORS, "jit") is None
