"""The draft beside a target: what it publishes and what it keeps."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ssd.config.params import DRAFTED, FanOut, Mode, Sampler, Speculation
from ssd.draft import engine
from ssd.execution.runner import Runner
from ssd.ipc.messages import Admit, Emission, Submit
from ssd.ipc.public import Message
from ssd.law import Law
from ssd.speculation.theory import DraftWait
from ssd.tuning.estimates import Mean
from ssd.tuning.plan import Plan
from ssd.tuning.tuner import Tuning
from ssd.verifier.plan_follower import PlanFollower
from tests.draft.audit import GREEDY, PROMPTS, SAMPLED, Auditor, World, drive, plainly, play, world_in
from tests.draft.pair import PAGE_SIZE, Clock, Draft, Pair, ScriptedTarget, config, params
from tests.models import tiny

WARM = Law(temperature=0.8, seed=77)


# -- a draft that is the target ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("mode", "lookahead", "fan_out"),
    [
        *((("sd", k, (3,))) for k in (1, 4, 8)),
        *(("ssd", k, (f,)) for k in (1, 4, 8) for f in (1, 3)),
        ("ssd", 1, (2, 3)),
        ("ssd", 4, (4, 3, 2, 2, 4)),
        ("ssd", 8, (3, 3, 2, 2, 2, 1, 1, 1, 4)),
    ],
    ids=str,
)
def test_a_draft_that_is_the_target_is_always_right(
    world: World, mode: Mode, lookahead: int, fan_out: FanOut, temperature: float
) -> None:
    """Every drafted token is accepted and every outcome was prepared. Equal texts alone would not show a draft whose
    keys and values are wrong."""
    settings = config(Speculation(mode, lookahead, fan_out, "jit"), deterministic=True)
    draft = Draft(settings, Runner(world.single.model, 400, PAGE_SIZE, deterministic=True))
    tokens = 1 + 6 * (lookahead + 1)
    texts = Pair(settings, world.single, draft).run(
        [tiny.token_ids(n, n) for n in (3, 16, 41)], params(3, tokens, temperature)
    )
    for metrics in texts.metrics:
        assert metrics.rounds == 6
        assert metrics.accepted_tokens == metrics.drafted_tokens == 6 * lookahead
        assert metrics.misses == 0
        assert metrics.hits == (5 if mode == "ssd" else 0)
    draft.assert_empty()


# -- what is published, and what is kept ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speculation", "scattered"),
    [
        (Speculation("ssd", 4, (3,), "jit"), False),
        (Speculation("ssd", 3, (1, 2, 1, 4), "jit"), True),
        (Speculation("ssd", 8, (1,), "jit"), True),
        (Speculation("sd", 4, (3,), "jit"), False),
        (Speculation("sd", 4, (3,), "jit"), True),
    ],
    ids=lambda s: (
        f"{s.mode} {s.num_speculative_tokens} {s.fan_out}" if isinstance(s, Speculation) else f"scattered={s}"
    ),
)
def test_in_every_state_the_draft_is_what_a_fresh_one_would_be(
    world: World, speculation: Speculation, scattered: bool
) -> None:
    """Forty rounds of random outcomes of three sequences with different laws, interrupted at random depths."""
    draft = Draft(config(speculation), world.draft)
    held = scatter(draft) if scattered else []
    audit = Auditor(world, draft)
    *_, targets = play(draft, speculation, random.Random(f"{speculation} {scattered}"))
    everything = set(range(1, speculation.num_speculative_tokens + 1))
    if speculation.mode == "ssd":
        assert audit.depths >= everything
        assert {fork < taken for fork, taken in audit.forks} == {True, False}
        assert any(0 < taken < speculation.num_speculative_tokens for _, taken in audit.forks)
    assert audit.trunks >= everything
    hits = sum(target.hits for target in targets)
    assert hits > 5 if speculation.mode == "ssd" else hits == 0
    for target in targets:
        target.release()
    draft.engine.drafter.pool.release(held)
    draft.assert_empty()


@pytest.mark.parametrize("fan_out", [(3,), ()])
def test_a_draft_that_is_told_tokens_is_what_a_fresh_one_would_be(world: World, fan_out: FanOut) -> None:
    speculation = Speculation("ssd", 6, fan_out, "jit")
    draft = Draft(config(speculation), world.draft)
    Auditor(world, draft)
    *_, targets = play(draft, speculation, random.Random(3), tells=True)
    assert sum(target.hits for target in targets) > 5


def test_what_was_drafted_beyond_the_tokens_in_flight_is_not_drafted_again(world: World) -> None:
    speculation = Speculation("ssd", 6, (3,), "jit")
    draft = Draft(config(speculation), world.draft)
    Auditor(world, draft)
    target = ScriptedTarget(draft, 0, PROMPTS[0], GREEDY, speculation, tells=True)
    draft.steps = 0
    assert target.outcome(0, world.best(tuple(PROMPTS[0]), GREEDY)[0], most=2)
    draft.work(1)
    depths = {(chain.fork, chain.rank): chain.computed for chain in draft.engine.trees[0].chains}
    assert depths.pop((2, 1)) == 5  # of K + 1 drafted tokens 2 are in flight
    assert set(depths.values()) == {1}


@pytest.mark.parametrize("steps", [None, 2])
def test_a_joint_allocation_copies_what_the_text_repeats(
    world: World, steps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains say what the text says after six equal tokens, the draft's own word elsewhere.

    How many chains grow depends on what a step takes: by this clock always the same."""
    monkeypatch.setattr(engine, "time", Clock())
    speculation = Speculation("ssd", 4, (), "jit", budget=10)
    draft = Draft(config(speculation), world.draft, steps=steps)
    audit, choice = Auditor(world, draft), random.Random(f"joint {steps}")
    prompt = [5, 6, 7, 8, 9, 10, 11, 12] * 3
    targets = [ScriptedTarget(draft, index, prompt, law, speculation) for index, law in enumerate((GREEDY, WARM))]
    for _ in range(12):
        for target in targets:
            drive(target, choice)
    assert audit.corrected > 10
    assert sum(target.hits for target in targets) > 5
    for target in targets:
        target.release()
    draft.assert_empty()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("sampler", ["coupled", "rejection"])
def test_a_joint_allocation_changes_no_token(world: World, temperature: float, sampler: Sampler) -> None:
    """Only which guesses are verified. The target's tuner asks for lists; here the draft hears of a budget instead."""
    settings = config(Speculation("ssd", 4, (3,), "jit", sampler=sampler))
    draft = Draft(settings, world.draft)
    pair = Pair(settings, world.target, draft)

    def jointly(message: Message) -> bool:
        if isinstance(message, Admit):
            message = replace(message, speculation=replace(message.speculation, fan_out=(), budget=12))
        return pair.deliver(message)

    pair.post = jointly
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12] * 3, *PROMPTS[1:]]
    texts = pair.run(prompts, params(4, 40, temperature))
    if sampler == "coupled" or temperature == 0.0:
        assert texts.ids == plainly(world, prompts, temperature, 40).ids
    assert sum(metrics.hits for metrics in texts.metrics) > 0
    draft.assert_empty()


def test_what_was_rejected_is_no_ones_prefix(world: World) -> None:
    """Pages that a promoted chain had filled are written again after its rejection. A prompt that reads as the chain
    did must not get them."""
    speculation = Speculation("ssd", 8, (2,), "jit")
    draft = Draft(config(speculation), world.draft)
    Auditor(world, draft)
    target = ScriptedTarget(draft, 0, PROMPTS[1][:6], GREEDY, speculation)
    assert target.outcome(0, next(iter(draft.engine.trees[0].chains)).tokens[0], 8)
    rejected = [*target.tokens, *target.in_flight]
    assert len(rejected) == 15
    for _ in range(9):
        target.outcome(0, next(t for t in range(99) if t not in target.in_flight[:1]), 8)
    other = ScriptedTarget(draft, 1, [*rejected, 1], GREEDY, speculation)
    assert draft.engine.trees[1].table.pages[0] == draft.engine.trees[0].table.pages[0]
    for one in (target, other):
        one.release()
    draft.assert_empty()


def scatter(draft: Draft) -> list[int]:
    """Take every other page of the draft, so that no two neighbours are free."""
    pages = [draft.engine.drafter.pool.allocate() for _ in range(draft.engine.drafter.pool.count)]
    draft.engine.drafter.pool.release([page for page in pages if page % 2])
    return [page for page in pages if page % 2 == 0]


@pytest.mark.parametrize("mode", ["sd", "ssd"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_real_target_never_spoils_the_drafts_cache(world: World, mode: Mode, temperature: float) -> None:
    """A target that agrees now and then, so that tokens are accepted, rejected and promoted; prompts that are long,
    which the draft computes in chunks, and shared ones."""
    settings = config(Speculation(mode, 4, (3,), "jit"))
    draft = Draft(settings, world.draft)
    Auditor(world, draft)
    prompts = [tiny.token_ids(n, n) for n in (5, 150, 30)] + [tiny.token_ids(30, 30)[:20]]
    texts = Pair(settings, world.target, draft).run(prompts, params(4, 14, temperature))
    assert texts.ids == plainly(world, prompts, temperature, 14).ids
    assert 0 < sum(m.accepted_tokens for m in texts.metrics) < sum(m.drafted_tokens for m in texts.metrics)
    if mode == "ssd":
        assert sum(m.hits for m in texts.metrics) and sum(m.misses for m in texts.metrics)
    draft.assert_empty()


@pytest.mark.parametrize("late", [1, 2, 3])
def test_a_chain_that_came_a_moment_too_late_does_not_hide_the_backup(world: World, late: int) -> None:
    """The target finds nothing and waits; before the draft hears of it, it publishes that very chain. The target must
    see more tokens than those of the chain."""
    speculation = Speculation("ssd", 4, (3,), "jit")
    draft = Draft(config(speculation), world.draft, steps=0)
    Auditor(world, draft)
    target = ScriptedTarget(draft, 0, PROMPTS[0], GREEDY, speculation)
    draft.work(1)
    assert not target.outcome(0, world.best(tuple(PROMPTS[0]), GREEDY)[0], most=4, late=late)
    assert target.waiting
    draft.work()
    target.launch(4)
    assert len(target.in_flight) == 4


@pytest.mark.parametrize("vocab_size", [131, 512])
def test_prompts_that_take_several_steps(tmp_path: Path, vocab_size: int) -> None:
    """Steps that bring no token, steps that grow other sequences' chains beside a prompt chunk, and a vocabulary that
    is ranked in blocks."""
    world = world_in(tmp_path, vocab_size=vocab_size)
    speculation = Speculation("ssd", 3, (2,), "jit")
    draft = Draft(config(speculation, max_model_len=250, vocab_size=vocab_size), world.draft)
    Auditor(world, draft)
    choice = random.Random(0)
    laws = (GREEDY, SAMPLED, GREEDY, SAMPLED)
    targets = []
    for request, (law, length) in enumerate(zip(laws, (200, 130, 5, 8), strict=True)):
        draft.steps = None if request == 0 else 1
        targets.append(ScriptedTarget(draft, request, tiny.token_ids(length, request, vocab_size), law, speculation))
    draft.work()
    for target in targets:
        for _ in range(2):
            drive(target, choice)


def test_the_last_positions_of_the_model_are_used_and_none_beyond(world: World) -> None:
    """Chains end where the model's positions end, without a fault."""
    speculation = Speculation("ssd", 4, (1,), "jit")
    draft = Draft(config(speculation, max_model_len=tiny.MAX_POSITION), world.draft)
    Auditor(world, draft)
    target = ScriptedTarget(draft, 0, tiny.token_ids(tiny.MAX_POSITION - 7, 1), GREEDY, speculation)
    longest = 0
    while len(target.tokens) < tiny.MAX_POSITION:
        tree = draft.engine.trees[0]
        longest = max(longest, *(tree.base + chain.fork + chain.computed for chain in tree.chains))
        target.outcome(0, next(iter(tree.chains)).tokens[0], 2)
    assert longest == tiny.MAX_POSITION
    target.release()
    draft.assert_empty()


# -- short and long ---------------------------------------------------------------------------------------------------


def test_a_long_prompt_does_not_keep_the_draft_from_a_short_one(world: World) -> None:
    """The next step computes both; the short prompt comes first, and the long one gets the rest of the budget."""
    speculation = Speculation("ssd", 4, (1,), "jit")
    draft = Draft(config(speculation), world.draft, steps=0)
    for request, length in enumerate((190, 5)):
        ScriptedTarget(draft, request, tiny.token_ids(length, request), GREEDY, speculation)
    draft.work(1)
    assert [tree.computed for tree in draft.engine.trees.values()] == [123, 5]
    draft.work(1)
    assert draft.engine.trees[0].computed == 190


def test_what_a_step_takes_beside_a_prompt_is_not_what_decoding_takes(world: World) -> None:
    """Otherwise a target would wait as long for a draft token as a prompt chunk takes."""
    speculation = Speculation("ssd", 4, (1,), "jit")
    draft = Draft(config(speculation), world.draft)
    noted = []

    class Noting(Mean):
        def note(self, value: float) -> None:
            running = pair.engine.scheduler.running
            noted.append(any(s.generated == 0 for s in running))

    settings = config(speculation, max_num_batched_tokens=8)
    pair = Pair(settings, world.target, draft)
    pair.proposer.tuning.estimates.verify_s = Noting(0.02, 0.1, 10)
    pair.run([tiny.token_ids(4, 1), tiny.token_ids(100, 2)], params(2, 40))
    assert noted and not any(noted)


# -- K, fan-outs and the mode change, the tokens do not ----------------------------------------------------------------

MODES: tuple[Mode, ...] = ("ngram", "ngram", *DRAFTED)
LONG_PROMPTS = [tiny.token_ids(n, n) for n in (5, 150, 30)]


@pytest.mark.parametrize(
    ("backup", "elastic", "temperature"), [("jit", False, 0.8), ("auto", False, 0.0), ("auto", True, 0.8)]
)
def test_any_plan_after_any_other(
    world: World, backup: str, elastic: bool, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tuner that throws dice for every row and round; the draft's cache is audited at every step."""
    dice = random.Random(f"{backup} {elastic} {temperature}")
    plans = set()

    def thrown(*_: Any) -> Plan:
        mode = dice.choice(MODES)
        lookahead = dice.choice((1, 2, 4, 8)) if mode in DRAFTED else 0
        plans.add((mode, lookahead))
        fan_out = tuple(dice.randint(1, 4) for _ in range(lookahead + 1))
        return Plan(mode, lookahead, sum(fan_out), fan_out, 1.0)

    monkeypatch.setattr(Tuning, "plan", thrown)
    monkeypatch.setattr(PlanFollower, "planned", lambda plans, row, _: plans._tuning.current(row.asked, row.kind))
    settings = config(Speculation("auto", 0, (), backup, budget=40))
    draft = Draft(settings, world.draft, steps=6)
    Auditor(world, draft, mixed=True)
    texts = Pair(settings, world.target, draft, elastic=elastic).run(LONG_PROMPTS, params(3, 30, temperature))
    assert texts.ids == plainly(world, LONG_PROMPTS, temperature, 30).ids
    assert len(plans) == 9
    assert all(m.mode == "auto" for m in texts.metrics) and sum(m.accepted_tokens for m in texts.metrics) > 0
    draft.assert_empty()


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_a_draft_that_hears_of_a_request_with_its_first_outcome(
    world: World, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where both models share cores; prompts are read by the target alone then. It waits for its draft however slow the
    machine is."""
    monkeypatch.setattr(
        "ssd.verifier.misses.depth_worth_waiting_for", lambda ready, missed, longest, *_: DraftWait(longest)
    )
    settings = config(Speculation(mode, 4, (2,), "jit"))
    draft = Draft(settings, world.draft)
    pair = Pair(settings, world.target, draft, elastic=True)
    told: list[Message] = []
    pair.post = lambda message: bool(told.append(message)) or pair.deliver(message)
    texts = pair.run(LONG_PROMPTS, params(3, 40))
    assert texts.ids == plainly(world, LONG_PROMPTS, 0.0, 40).ids
    admits = [message for message in told if isinstance(message, Admit)]
    # One in a round, as each has a text to read.
    told_at = sorted(len(message.token_ids) for message in admits)
    assert [told - read for told, read in zip(told_at, sorted(map(len, LONG_PROMPTS)), strict=True)] == [0, 2, 1]
    assert all(m.accepted_tokens > 5 for m in texts.metrics)
    draft.assert_empty()


def test_a_shrinking_batch_does_not_wake_the_draft_on_its_way(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One or two rows would speculate; two are left for four rounds, then one for many."""

    def planned(tuning: Tuning, *_: object) -> Plan:
        return Plan("ssd", 2, 3, (1, 1, 1), 1.0) if tuning._batch <= 2 else Plan("ngram", speed=1.0)

    monkeypatch.setattr(Tuning, "plan", planned)
    settings = config(Speculation("auto", 0, (), "jit"))
    draft = Draft(settings, world.draft)
    pair = Pair(settings, world.target, draft, elastic=True)
    told: list[Message] = []
    pair.post = lambda message: bool(told.append(message)) or pair.deliver(message)
    laws = [replace(law, max_tokens=count) for law, count in zip(params(3, 40), (40, 10, 14), strict=True)]
    texts = pair.run([[5, 6, 7], [8, 9, 10], [11, 12, 13]], laws)
    admits = [message for message in told if isinstance(message, Admit)]
    assert [message.request for message in admits] == [0] and len(admits[0].token_ids) > 3 + 14
    assert sum(m.drafted_tokens for m in texts.metrics) > 0
    pair.run([[5, 6, 7]], params(1, 8))
    admits = [message for message in told if isinstance(message, Admit)]
    assert len(admits[1].token_ids) == 3  # a request of its own has the draft from its first round on
    draft.assert_empty()


def test_the_real_tuner_on_a_real_draft(world: World) -> None:
    settings = config(Speculation("auto", 0, (), "jit"))
    draft = Draft(settings, world.draft)
    texts = Pair(settings, world.target, draft).run(LONG_PROMPTS, params(3, 45))
    assert texts.ids == plainly(world, LONG_PROMPTS, 0.0, 45).ids
    draft.assert_empty()


# -- the figures of every round add up to those of the request ---------------------------------------------------------


@pytest.mark.parametrize("mode", ["sd", "ssd"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_sum_of_the_rounds(world: World, mode: Mode, temperature: float) -> None:
    """The draft takes few steps a round: hits, misses of several kinds, late chains."""
    settings = config(Speculation(mode, 4, (2,), "jit"))
    pair = Pair(settings, world.target, Draft(settings, world.draft, steps=5))
    rounds: dict[int, list[Emission]] = {i: [] for i in range(len(PROMPTS))}
    for request, (prompt, law) in enumerate(zip(PROMPTS, params(len(PROMPTS), 30, temperature), strict=True)):
        pair.engine.submit(Submit(request, prompt, law))
    while pair.engine.busy:
        for emission in pair.engine.step():
            rounds[emission.request].append(emission)
        assert pair.engine.load().draft_state == "up"
    said: Counter[str] = Counter()
    for emissions in rounds.values():
        metrics = emissions[-1].metrics
        assert metrics is not None
        assert metrics.rounds == len(emissions) - 1 == sum(metrics.acceptance_histogram)
        assert metrics.drafted_tokens == sum(e.drafted for e in emissions)
        assert metrics.accepted_tokens == sum(e.accepted for e in emissions)
        assert metrics.accepted_tokens == sum(a * count for a, count in enumerate(metrics.acceptance_histogram))
        assert all(e.accepted <= e.drafted for e in emissions) and emissions[0].cache == ""
        assert {e.source for e in emissions if e.drafted} == {"draft"}
        cache = Counter(e.cache for e in emissions)
        assert metrics.hits == cache["hit"]
        assert metrics.misses == sum(cache.values()) - cache["hit"] - cache[""] - cache["first_round"]
        said += cache
    if mode == "sd":
        assert set(said) == {""}
    else:
        assert said["hit"] and said["token_not_covered"] and said["first_round"]
        assert "draft_down" not in said
    assert pair.engine.load().kv_cache_usage == 0
