"""When the tuner measures, decides and tries again, on rounds that the test makes up."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import msgspec
import pytest

from ssd.config.params import AUTO_LOOKAHEAD, Speculation
from ssd.errors import RequestError
from ssd.speculation.fan_out import fan_out_at, hit_rate
from ssd.tuning.learner import DraftTelemetry, Learner
from ssd.tuning.rounds import DecodingRound, Tuning

AUTO = Speculation("ssd", 0, ())
looked_up = Learner.looked_up


@dataclass
class World:
    """A draft that is right with probability `rate`, a verification of `verify` seconds, tree steps of `step`. The
    bonus token is one of `ranks` among the candidates; what is not covered is verified without draft tokens."""

    rate: float
    verify: float = 0.050
    step: float = 0.005
    each: float = 0.0  # more of a step for each chain
    ranks: tuple[int | None, ...] = (1, 1, 2, 2, None)
    tuning: Tuning = field(default_factory=Tuning)
    dice: Random = field(default_factory=lambda: Random(0))
    counters: DraftTelemetry = field(default_factory=lambda: DraftTelemetry(0, 0, 0.0, 0))
    hit: bool = False

    def play(self, rounds: int, asked: Speculation = AUTO) -> list[Speculation]:
        """What a sequence did in each round."""
        seen = []
        for _ in range(rounds):
            now = self.tuning.current(asked)
            seen.append(now)
            if now.mode == "ar":
                self.tuning.learn(DecodingRound(1, 1, self.verify * 0.95, 0.0, 1, True, False), self.counters)
                self.tuning.end_round(self.counters)
                continue
            lookahead, chains = now.num_speculative_tokens, now.chains
            steps, seconds, grown = self.counters.steps, self.counters.step_seconds, self.counters.grown
            self.counters = DraftTelemetry(
                0, steps + 4, seconds + 4 * (self.step + self.each * chains), grown + 4 * chains
            )
            drafted = lookahead if self.hit or now.mode == "sd" else 0
            accepted = next((index for index in range(drafted) if self.dice.random() >= self.rate), drafted)
            waited = lookahead * self.step if now.mode == "sd" else 0.0
            took = self.verify * (1 + 0.01 * drafted)
            round_ = DecodingRound(1, 1 + drafted, took, waited, 1 + accepted, False, now.mode == "ssd")
            self.tuning.learn(round_, self.counters)
            self.tuning.end_round(self.counters)
            if not self.hit:
                self.tuning.learner.missed(1 + accepted, waited, drafted)
            self.tuning.learner.outcome(drafted, accepted)
            prepared, rank = fan_out_at(accepted, drafted, now.fan_out), self.dice.choice(self.ranks)
            self.tuning.learner.looked_up(prepared, rank)
            self.hit = rank is not None and rank <= prepared
        return seen


def depth(found: list[Speculation]) -> float:
    speculating = [s.num_speculative_tokens for s in found if s.mode != "ar"]
    return sum(speculating) / max(1, len(speculating))


def test_what_was_fixed_stays() -> None:
    for asked in (Speculation("ssd", 3, (2,)), Speculation("ar"), Speculation("sd", 5)):
        assert World(0.0).tuning.current(asked) is asked


def test_numbers_take_the_place_of_auto_from_the_first_round_on() -> None:
    for asked in (AUTO, Speculation("ssd", 0, (2,)), Speculation("ssd", 6, ()), Speculation("sd", 0), AUTO):
        for found in World(0.6).play(200, asked):
            if found.mode != "ar":
                found.check()
                assert msgspec.convert(msgspec.to_builtins(found), Speculation) == found
                assert not found.auto
                assert len(found.fan_out) == (len(asked.fan_out) or found.num_speculative_tokens + 1)
                assert found.chains <= asked.chains and found.num_speculative_tokens <= asked.longest
                assert asked.num_speculative_tokens in (0, found.num_speculative_tokens)


def test_a_good_draft_looks_far_and_a_poor_one_does_not() -> None:
    good, poor = (depth(World(rate).play(600)[300:]) for rate in (0.95, 0.3))
    assert good > 6 and poor < 5


def test_chains_that_take_time_are_few() -> None:
    """As on a CPU that computes as long as it reads; where chains are free there are many."""
    dear, free = (World(0.5, 0.013, 0.0035, each).play(400)[200:] for each in (0.0006, 0.0))
    assert all(s.mode == "ssd" and s.chains <= 9 for s in dear)
    assert all(s.mode == "ssd" and s.chains >= 12 for s in free)


def test_what_a_chain_takes_is_seen_before_anything_is_decided() -> None:
    played = World(0.5, each=0.0006).play(32)
    assert len({s.chains for s in played}) == 2 and {s.mode for s in played} == {"ssd"}


def test_a_useless_draft_is_given_up_and_tried_now_and_then() -> None:
    world = World(0.0)
    found = world.play(3000)
    share = sum(s.mode == "ar" for s in found[600:]) / 2400
    assert 0.8 < share < 1.0


def test_a_draft_that_becomes_useful_is_found() -> None:
    world = World(0.0)
    world.play(1000)
    world.rate = 0.9
    found = world.play(1500)
    assert sum(s.mode == "ssd" for s in found[-300:]) > 250


def test_a_fixed_lookahead_is_never_given_up() -> None:
    assert all(s.mode == "ssd" for s in World(0.0).play(2000, Speculation("ssd", 4, ())))


def test_plain_decoding_is_measured_where_it_is_near() -> None:
    near = World(0.3).play(1000)
    clear = World(0.95).play(1000)
    assert any(s.mode == "ar" for s in near[:200]) and not any(s.mode == "ar" for s in clear)


def test_a_trial_of_one_way_leaves_the_others_alone() -> None:
    """`sd` does not pay here, `ssd` does: its rounds are not made plain while `sd` is tried again."""
    world = World(0.5, step=0.034)
    in_turn = Speculation("sd", 0, ())
    for _ in range(120):
        world.play(10)
        world.tuning.current(in_turn)
    plans = {way.mode: plan.lookahead for way, plan in world.tuning._plans.items()}
    assert plans["sd"] == 0 and plans["ssd"] > 0
    seen = [world.tuning.current(AUTO).mode for _ in range(600) if world.play(1)]
    assert seen.count("ar") <= 8


@pytest.mark.parametrize(
    ("steps", "seconds", "grown"), [(4, 0.0, 40), (4, -1.0, 40), (4, 1e9, 4), (4, 0.1, -5), (-3, 1, 1)]
)
def test_counters_that_cannot_be_are_not_believed(steps: int, seconds: float, grown: int) -> None:
    world = World(0.6)
    world.tuning.learn(DecodingRound(1, 5, 0.05, 0.0, 1, False, True), DraftTelemetry(0, steps, seconds, grown))
    world.tuning.end_round(DraftTelemetry(0, steps, seconds, grown))
    assert world.tuning.learner.measurements(1) is None
    assert any(s.mode == "ssd" for s in world.play(200))


def test_a_client_cannot_make_it_remember_everything() -> None:
    tuning = Tuning()
    for c in range(1000):
        tuning.current(Speculation("ssd", 0, (), budget=2 + c % 60, saguaro_c=c / 1000, sampler="rejection"))
    assert len(tuning._plans) <= 8


def test_a_tree_that_never_hits_is_given_up() -> None:
    """And nothing comes of waiting for it."""
    world = World(0.55, ranks=(None,))
    found = world.play(2500)
    measured = world.tuning.learner.measurements(1)
    assert measured is not None and hit_rate(0.55, (8, 8, 8), measured.misses) < 0.05
    assert sum(s.mode == "ar" for s in found[1500:]) > 500


@pytest.mark.parametrize(
    ("asked", "message"),
    [(Speculation("ssd", 0, (3, 2, 1)), "give -k a number"), (Speculation("ssd", 8, (), budget=8), "a budget of 8")],
)
def test_what_contradicts_itself_is_refused(asked: Speculation, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        asked.check()


def test_bounds_of_what_will_be_chosen() -> None:
    assert (AUTO.longest, AUTO.chains) == (AUTO_LOOKAHEAD, 32)
    assert Speculation("ssd", 0, (3,)).chains == 3 * (AUTO_LOOKAHEAD + 1)
    assert Speculation("ssd", 4, (), budget=20).chains == 20


def test_what_nobody_asks_for_is_not_decided() -> None:
    """A plan stays as it was while other requests, that need none, are at work; and a decision is seldom once much is
    known."""
    world = World(0.6)
    world.play(200)
    decisions: list[int] = []
    decide = world.tuning._decide
    world.tuning._decide = lambda *args: decisions.append(world.tuning._rounds) or decide(*args)  # type: ignore
    world.play(640)
    assert 8 <= len(decisions) <= 640 / 64 + 2 * 4
    decisions.clear()
    world.tuning.current(AUTO)
    world.play(640, Speculation("ssd", 3, (2,)))
    assert len(decisions) <= 1
