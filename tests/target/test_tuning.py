"""When the tuner measures, decides and tries again, on rounds that the test makes up."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import msgspec
import pytest

from ssd.errors import RequestError
from ssd.ipc.board import Telemetry
from ssd.params import AUTO_LOOKAHEAD, Speculation
from ssd.target.tuning import Tuning

AUTO = Speculation("ssd", 0, ())


@dataclass
class World:
    """A draft that is right with probability `rate`, a verification of `verify` seconds, tree steps of `step`."""

    rate: float
    verify: float = 0.050
    step: float = 0.005
    tuning: Tuning = field(default_factory=Tuning)
    dice: Random = field(default_factory=lambda: Random(0))
    counters: Telemetry = field(default_factory=lambda: Telemetry(0, 0, 0.0, 0))

    def play(self, rounds: int, asked: Speculation = AUTO) -> list[Speculation]:
        """What a sequence did in each round."""
        seen = []
        for number in range(rounds):
            now = self.tuning.current(asked)
            seen.append(now)
            if now.mode == "ar":
                self.tuning.round(1, 1, self.verify * 0.95, alone=True)
                continue
            lookahead, chains = now.num_speculative_tokens, now.chains
            steps, seconds, grown = self.counters.steps, self.counters.step_seconds, self.counters.grown
            self.counters = Telemetry(0, steps + 4, seconds + 4 * self.step, grown + 4 * chains)
            self.tuning.steps(self.counters)
            self.tuning.round(1, 1 + lookahead, self.verify * (1 + 0.01 * lookahead), alone=False)
            accepted = next((index for index in range(lookahead) if self.dice.random() >= self.rate), lookahead)
            self.tuning.learner.outcome(lookahead, accepted)
            self.tuning.learner.looked_up(now.fan_out[accepted], 1 + number % 2 if number % 5 else None)
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
                assert not found.auto and len(found.fan_out) == found.num_speculative_tokens + 1
                assert found.chains <= asked.chains and found.num_speculative_tokens <= asked.longest
                assert asked.num_speculative_tokens in (0, found.num_speculative_tokens)


def test_a_good_draft_looks_far_and_a_poor_one_does_not() -> None:
    good, poor = (depth(World(rate).play(600)[300:]) for rate in (0.95, 0.3))
    assert good > 6 and poor < 5


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
