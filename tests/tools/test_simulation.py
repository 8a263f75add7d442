"""The simulated engines against closed forms, and what must not change a speed against what must."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from ssd.errors import UsageError
from ssd.speculation.fan_out import single_chain
from ssd.speculation.theory import LinearCost, expected_tokens, speedup_sd, speedup_ssd
from ssd.tuning.estimates import Measurements
from ssd.tuning.predictor import best_fan_out, predicted, predicted_plain, predicted_sd
from tools.simulate.closed_form import speed_sd, speed_ssd, speedup_of_batch
from tools.simulate.paper import FITTED
from tools.simulate.run import simulate
from tools.simulate.setup import Devices, Setup
from tools.simulate.statistics import AcceptanceLaw, Statistics

K = 4
ALL, TWO = AcceptanceLaw((1.0,)), AcceptanceLaw((1.0, 1.0, 0.0))
ROUNDS = 64  # a power of two: shares such as 3/4 then come out exactly


def devices(
    verify: float = 10.0,
    step: float = 1.0,
    each: float = 0.0,
    drafts: int = 1,
    overhead: float = 0.0,
    delay: float = 0.0,
) -> Devices:
    return Devices(LinearCost(verify, 0.0), LinearCost(step, each), drafts, overhead, delay)


def setup(
    machine: Devices, hit: AcceptanceLaw = ALL, miss: AcceptanceLaw = TWO, hits: float = 0.75, mode: str = "ssd"
) -> Setup:
    return Setup(machine, Statistics(hit, hit, miss, (1 - hits, 0.0)), mode, lookahead=K, fan_out=(2,))


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_plain_decoding_is_one_verification_for_a_token(batch: int) -> None:
    machine = Devices(LinearCost(0.02, 0.001), LinearCost(1.0, 0.0), overhead=5.0, delay=5.0)
    found = simulate(replace(setup(machine, mode="ar"), batch=batch), ROUNDS)
    assert found.tokens_per_second == pytest.approx(1 / (0.02 + 0.001 * batch), rel=1e-9)
    assert found.throughput == pytest.approx(batch * found.tokens_per_second)
    assert (found.target_idle, found.draft_idle) == pytest.approx((0.0, 1.0))


@pytest.mark.parametrize("step", [0.1, 2.5])
@pytest.mark.parametrize("batch", [1, 5])
def test_speculative_decoding_drafts_and_verifies_in_turn(step: float, batch: int) -> None:
    case = replace(setup(devices(step=step), hit=TWO, mode="sd"), batch=batch)
    found = simulate(case, ROUNDS)
    assert found.tokens_per_second == pytest.approx(speedup_sd(3, K * step / 10) / 10, rel=1e-9)
    assert found.tokens_per_second == pytest.approx(speed_sd(case), rel=1e-9)
    assert found.target_idle == pytest.approx(K * step / (10 + K * step))
    assert found.draft_idle == pytest.approx(10 / (10 + K * step))


@pytest.mark.parametrize("hits", [0.25, 0.75, 1.0])
@pytest.mark.parametrize("step", [0.5, 2.5])
def test_theorem_7(hits: float, step: float) -> None:
    """Batch 1, a tree that fits into the verification."""
    case = setup(devices(step=step), hits=hits)
    speedup = speedup_ssd(hits, K + 1, 3, K * step / 10, K * step / 10)
    found = simulate(case, ROUNDS)
    assert found.tokens_per_second == pytest.approx(speedup / 10, rel=1e-9)
    assert found.tokens_per_second == pytest.approx(speed_ssd(case), rel=1e-9)
    assert found.hit_rate == hits
    assert found.tokens_on_hit == K + 1 and found.tokens_on_miss == pytest.approx(3 if hits < 1 else 0)


def test_theorem_7_with_laws_instead_of_fixed_lengths() -> None:
    case = setup(devices(), hit=AcceptanceLaw((0.9, 0.95)), miss=AcceptanceLaw((0.6,)))
    assert simulate(case, 4096).tokens_per_second == pytest.approx(speed_ssd(case), rel=0.005)


def test_the_reference_finishes_its_tree_before_it_reads_a_miss() -> None:
    """Theorem 7 has no tree in (1 - p)(1 + T_b); strict ping-pong does."""
    found = simulate(setup(devices(step=4.0)), ROUNDS)
    assert found.round_s == pytest.approx(16 + 0.25 * 16, rel=1e-9)


def test_rebuilding_is_part_of_the_tree() -> None:
    """One more forward, which shows only where the tree overruns the verification."""
    for step, expected in ((1.0, 10.0), (2.5, 12.5)):
        found = simulate(setup(replace(devices(step=step), rebuild=1), hits=1.0), ROUNDS)
        assert found.round_s == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("batch", [2, 4, 8])
def test_corollary_16(batch: int) -> None:
    """One missed row makes the batch wait for its backup."""
    case = replace(setup(devices(), hits=0.75), batch=batch)
    found = simulate(case, 4096)
    speedup = speedup_of_batch(0.75, K + 1, 3, 0.4, 0.4, batch)
    assert found.tokens_per_second == pytest.approx(speedup / 10, rel=0.01)
    assert found.round_s == pytest.approx(10 + (1 - 0.75**batch) * 4, rel=0.01)


@pytest.mark.parametrize("engine", ["reference", "anytime"])
def test_a_cheap_backup_never_waits(engine: str) -> None:
    case = replace(setup(devices(), hits=0.75), batch=8, engine=engine, backup="cheap")
    assert simulate(case, ROUNDS).round_s == pytest.approx(10, rel=1e-9)


def test_a_cheap_backup_brings_what_it_is_said_to_bring() -> None:
    case = replace(setup(devices(), hits=0.5), backup="cheap")
    case = replace(case, statistics=replace(case.statistics, cheap=AcceptanceLaw((1.0, 0.0))))
    assert simulate(case, ROUNDS).tokens_on_miss == pytest.approx(2)
    assert simulate(replace(case, engine="anytime"), ROUNDS).tokens_on_miss == pytest.approx(2)


def test_alone_and_in_time_both_engines_are_alike() -> None:
    case = setup(devices())
    anytime = replace(case, engine="anytime", backup="neural")
    assert simulate(anytime, ROUNDS).tokens_per_second == pytest.approx(simulate(case, ROUNDS).tokens_per_second)


def test_anytime_waits_only_where_that_pays() -> None:
    """The batch of 8 would pay for one row; alone a row gains more than it waits for."""
    case = replace(setup(devices(step=2.0), miss=ALL), engine="anytime", backup="auto")
    alone, many = simulate(case, ROUNDS), simulate(replace(case, batch=8), ROUNDS)
    assert alone.round_s > 10.1 and alone.tokens_on_miss == K + 1
    assert many.tokens_per_second > simulate(replace(case, batch=8, backup="neural"), ROUNDS).tokens_per_second
    far = replace(case, devices=replace(case.devices, delay=100.0))
    assert simulate(far, ROUNDS).round_s == pytest.approx(10, rel=1e-9)  # not for an answer from so far away


def test_anytime_takes_a_chain_at_the_depth_it_has() -> None:
    """3 steps of 3 s end within 10 s; a message of 0.75 s each way leaves two of them; the round stays as long."""
    case = replace(setup(devices(step=3.0), hits=1.0), engine="anytime", backup="cheap", lookahead=3)
    for delay, depth in ((0.0, 3), (0.4, 3), (0.75, 2), (3.0, 1)):
        found = simulate(replace(case, devices=replace(case.devices, delay=delay)), ROUNDS)
        assert found.tokens_per_round == depth + 1
        assert found.round_s == pytest.approx(10, rel=1e-9)


def test_a_chain_without_a_token_in_time_is_late_and_no_hit() -> None:
    case = replace(setup(devices(step=30.0), hits=1.0), engine="anytime", backup="cheap")
    found = simulate(case, ROUNDS)
    assert found.hit_rate < 0.5 and found.late_rate > 0.5
    assert found.round_s == pytest.approx(10, rel=1e-9)


@pytest.mark.parametrize(("step", "expected"), [(1.0, 10 + 0.6), (2.6, 10.6), (3.0, 12.0)])
def test_the_delay_adds_both_ways_to_a_reference_round_unless_the_tree_is_longer(step: float, expected: float) -> None:
    found = simulate(setup(devices(step=step, delay=0.3), hits=1.0), ROUNDS)
    assert found.round_s == pytest.approx(expected, rel=1e-9)


def test_delay_and_overhead_of_speculative_decoding() -> None:
    found = simulate(setup(devices(delay=0.3, overhead=0.2), mode="sd"), ROUNDS)
    assert found.round_s == pytest.approx(10 + 4 + 0.6 + 0.2, rel=1e-9)


def test_draft_devices_split_the_chains_of_a_step() -> None:
    """10 chains on one device take 11 s a step; on 4 the fullest has 3 of them; beyond 10 nothing is left to split."""
    for drafts, step in ((1, 11.0), (4, 4.0), (10, 2.0), (64, 2.0)):
        found = simulate(setup(devices(step=1.0, each=1.0, drafts=drafts), hits=1.0), ROUNDS)
        assert found.round_s == pytest.approx(max(10.0, K * step), rel=1e-9)


def test_the_trees_of_a_batch_share_the_steps() -> None:
    """2 rows of 10 chains: 1 + 20 s a step. On 4 devices 5 chains each, of 3 rows 8, 8, 7 and 7: two wait a little."""
    case = setup(devices(step=1.0, each=1.0), hits=1.0)
    assert simulate(replace(case, batch=2), ROUNDS).round_s == pytest.approx(K * 21, rel=1e-9)
    found = simulate(replace(case, batch=3, devices=devices(step=1.0, each=1.0, drafts=4)), ROUNDS)
    assert found.round_s == pytest.approx(K * 9, rel=1e-9)
    assert found.draft_idle == pytest.approx(1 - (9 + 9 + 8 + 8) / (4 * 9), rel=1e-9)


@pytest.mark.parametrize(("engine", "tokens"), [("anytime", 1), ("reference", K + 1)])
def test_rows_without_a_speculation_are_short_only_in_this_engine(engine: str, tokens: int) -> None:
    machine = replace(devices(), verify=LinearCost(10.0, 1.0))
    case = replace(setup(machine, hits=0.0), engine=engine, backup="cheap", batch=2)
    assert simulate(case, ROUNDS).round_s == pytest.approx(10 + 2 * tokens, rel=1e-9)


@pytest.mark.parametrize(("engine", "backup"), [("reference", "neural"), ("anytime", "cheap")])
@pytest.mark.parametrize("batch", [1, 6])
def test_more_drafts_are_never_slower(engine: str, backup: str, batch: int) -> None:
    case = replace(setup(devices()), engine=engine, backup=backup, batch=batch)
    speeds = [
        simulate(replace(case, devices=devices(step=0.2, each=0.5, drafts=drafts)), 256).tokens_per_second
        for drafts in (1, 2, 3, 5, 8)
    ]
    assert all(more >= less * (1 - 1e-9) for less, more in pairwise(speeds)) and speeds[-1] > speeds[0]


def test_the_hit_rate_depends_on_the_fan_out_of_the_accepted_length() -> None:
    """Half of the rounds accept nothing, half everything: only those prepared for are hits."""
    halves = AcceptanceLaw((0.5, 1.0))
    case = setup(devices(), hit=halves, miss=halves)
    case = replace(case, statistics=Statistics.alike(halves, (1.0, 1.0)), fan_out=(4, 1, 1, 1, 10))
    found = simulate(case, 4096)
    assert found.hit_rate == pytest.approx(0.5 * (1 - 1 / 4) + 0.5 * (1 - 1 / 10), abs=0.01)


def pearl(accepted: float, first: float, engine: str, backup: str) -> Setup:
    """One chain; draft tokens are accepted at one rate, and its first token is the bonus token at another."""
    law = Statistics.alike(AcceptanceLaw((accepted,)), (1 - first, 0.5))
    case = replace(setup(devices()), statistics=law, fan_out=single_chain(K))
    return replace(case, engine=engine, backup=backup)


@pytest.mark.parametrize(("engine", "backup"), [("reference", "cheap"), ("anytime", "cheap"), ("anytime", "auto")])
def test_pearl_always_hits_a_draft_that_is_always_right(engine: str, backup: str) -> None:
    found = simulate(replace(pearl(1.0, 1.0, engine, backup), batch=3), ROUNDS)
    assert (found.hit_rate, found.tokens_per_round) == (1.0, K + 1)


@pytest.mark.parametrize("engine", ["reference", "anytime"])
def test_pearl_that_waits_after_a_miss_hits_what_is_accepted_whole(engine: str) -> None:
    """a^K (1 - c) of all rounds, and Theorem 7 with that rate."""
    found = simulate(pearl(0.9, 0.8, engine, "neural"), 4096)
    hits = 0.9**K * 0.8
    assert found.hit_rate == pytest.approx(hits, abs=0.01)
    tokens = expected_tokens(0.9, K)
    assert found.tokens_per_second == pytest.approx(speedup_ssd(hits, tokens, tokens, 0.4, 0.4) / 10, rel=0.01)


@pytest.mark.parametrize("engine", ["reference", "anytime"])
def test_pearl_verifies_one_token_after_a_rejection(engine: str) -> None:
    """Rows without and with K tokens in flight are two states; no round waits for the draft.

    Without tokens the chain needs only its first one right, 1 - c. With K tokens all must be: a^K (1 - c)."""
    found = simulate(pearl(0.9, 0.8, engine, "cheap"), 4096)
    again, back = 0.9**K * 0.8, 0.8
    hits = back / (1 + back - again)
    assert found.hit_rate == pytest.approx(hits, abs=0.015) and found.tokens_on_miss == 1
    assert found.tokens_per_round == pytest.approx(1 - hits + hits * expected_tokens(0.9, K), rel=0.01)
    assert found.round_s == pytest.approx(10, rel=1e-9)


def test_a_length_without_a_chain_never_hits() -> None:
    halves = AcceptanceLaw((0.5, 1.0))
    case = replace(setup(devices()), statistics=Statistics.alike(halves, (0.0, 1.0)), fan_out=(1, 1, 1, 1, 0))
    assert simulate(case, 4096).hit_rate == pytest.approx(0.5, abs=0.01)
    assert simulate(replace(case, fan_out=(0, 0, 0, 0, 1)), 4096).hit_rate == pytest.approx(0.5, abs=0.01)


def test_a_seed_decides_everything() -> None:
    case = replace(setup(devices(), hit=AcceptanceLaw((0.8,))), batch=3, engine="anytime", backup="auto")
    assert simulate(case, 200, seed=1) == simulate(case, 200, seed=1)
    assert simulate(case, 200, seed=1) != simulate(case, 200, seed=2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lookahead": 0},
        {"fan_out": (3, 2)},
        {"fan_out": (0,)},
        {"fan_out": (0,) * (K + 1)},
        {"fan_out": (2, 2, 2, 2, -1)},
        {"batch": 0},
        {"batch": 65},
        {"mode": "none"},
        {"engine": "none"},
        {"backup": "none"},
        {"backup": "auto"},  # of the reference engine
    ],
)
def test_a_setup_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        replace(setup(devices()), **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"overhead": -1.0},
        {"delay": -1.0},
        {"drafts": 0},
        {"verify": LinearCost(-1.0, 0.0)},
        {"step": LinearCost(-1.0, 0.0)},
    ],
)
def test_devices_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        replace(devices(), **wrong)  # type: ignore[arg-type]


def test_other_nonsense_is_refused() -> None:
    with pytest.raises(UsageError):
        AcceptanceLaw((0.5, 1.5))
    with pytest.raises(UsageError):
        Statistics.alike(ALL, (-1.0, 0.5))


@pytest.mark.parametrize("lookahead", [2, 4, 7, 8])
def test_the_simulated_engine_is_as_fast_as_the_tuner_predicts(lookahead: int) -> None:
    """The paper's pair alone: `ssd` within 10 %, `sd` within 3 % (measured: 4 % and 0.1 %)."""
    pair, law = Measurements(*FITTED), AcceptanceLaw(FITTED.acceptance)
    fan_out = best_fan_out(pair, lookahead, 24)
    devices = Devices(FITTED.verify, FITTED.step, overhead=FITTED.overhead)
    statistics = Statistics.alike(law, FITTED.misses).foreseeing(fan_out, lookahead)
    setup = Setup(devices, statistics, "ssd", "anytime", lookahead, fan_out, 1, "auto")
    assert predicted(pair, 1, lookahead, fan_out) == pytest.approx(simulate(setup).throughput, rel=0.10)
    assert predicted_sd(pair, 1, lookahead) == pytest.approx(simulate(replace(setup, mode="sd")).throughput, rel=0.03)
    assert predicted_plain(pair, 1) == pytest.approx(simulate(replace(setup, mode="ar"), 64).throughput)
