"""What the tuner chooses in worlds that the test makes up: from the first round on, and when a world changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean

import msgspec
import pytest

from ssd.config.params import AUTO_LOOKAHEAD, DRAFTED, Mode, Speculation
from ssd.errors import RequestError
from ssd.speculation.fan_out import MOST, fan_out_at, optimal_fan_out, single_chain
from ssd.speculation.theory import LinearCost
from ssd.tuning import knowledge, tuner
from ssd.tuning.estimates import DecodingRound, DraftTelemetry, Measurements, kind_of
from ssd.tuning.knowledge import Agreement, Knowledge
from ssd.tuning.plan import Choices, Plan, batch_class
from ssd.tuning.predictor import ranked_plans
from ssd.tuning.tuner import Tuning

AUTO, AHEAD = Speculation(num_speculative_tokens=0, fan_out=(), backup="jit"), Speculation("ssd", 0, (), "jit")
VERIFY, STEP = LinearCost(0.050, 0.0005), LinearCost(0.005, 0.0)
SIZES, CHAINS = (1, 2, 3, 4, 8, 16, 64), (1, 2, 4, 8, 16, 64)


@dataclass
class World:
    """A draft that is right with probability `rate`. Verifications and tree steps take `verify` and `step`, `slower`
    times as long while both models work. The bonus token is one of `ranks` among the candidates; a row that misses is
    verified without draft tokens."""

    rate: float
    verify: LinearCost = VERIFY
    step: LinearCost = STEP
    slower: float = 1.0
    ranks: tuple[int | None, ...] = (1, 1, 2, 2, None)
    dice: Random = field(default_factory=lambda: Random(0))
    tuning: Tuning = field(default_factory=lambda: Tuning(dice=Random(1)))
    counters: DraftTelemetry = field(default_factory=lambda: DraftTelemetry(0, 0, 0.0, 0))
    hit: bool = False

    def __post_init__(self) -> None:
        alone = {n: self.verify.at(n) for n in SIZES}, {n: self.step.at(n) for n in CHAINS}
        beside = ({n: self.slower * seconds for n, seconds in table.items()} for table in alone)
        names = "verify", "step", "verify_beside", "step_beside"
        self.tuning.recall(Knowledge(tables=dict(zip(names, (*alone, *beside), strict=True))))
        self.tuning.situate([0], DRAFTED)

    def play(self, rounds: int, asked: Speculation = AUTO) -> list[Speculation]:
        """What a sequence did in each round."""
        seen = []
        for _ in range(rounds):
            now = self.tuning.current(asked)
            seen.append(now)
            if now.mode in DRAFTED:
                self._drafted(now)
            else:
                noise = self.dice.uniform(0.9, 1.1)
                self._note(1, noise * self.verify.at(1), 0.0, 1, False, Plan("ngram"))
                self.tuning.estimates.learners[0].prompt_lookup(0, 0)
        return seen

    def _drafted(self, now: Speculation) -> None:
        lookahead, in_turn, noise = now.num_speculative_tokens, now.mode == "sd", self.dice.uniform(0.9, 1.1)
        slower = 1.0 if in_turn else self.slower
        spread = optimal_fan_out(0.5, 0.6, lookahead, now.budget)  # in place of the draft's own
        fan_out = now.fan_out or tuple(min(MOST, count) for count in spread)
        verify, step = slower * self.verify.at(1 + lookahead), slower * self.step.at(sum(fan_out))
        depth = lookahead if in_turn else min(lookahead, int(verify / step - 0.5))
        drafted = depth if self.hit or in_turn else 0
        accepted = next((index for index in range(drafted) if self.dice.random() >= self.rate), drafted)
        steps, seconds, grown = self.counters.steps, self.counters.step_seconds, self.counters.grown
        chains = 1 if in_turn else sum(fan_out)
        self.counters = DraftTelemetry(0, steps + 4, seconds + 4 * step, grown + 4 * chains)
        plan = Plan.of(now)
        waited = lookahead * step if in_turn else 0.0
        self._note(1 + drafted, noise * slower * self.verify.at(1 + drafted), waited, 1 + accepted, not in_turn, plan)
        learner = self.tuning.estimates.learners[0]
        if not in_turn:
            if not self.hit:
                learner.missed(1 + accepted, 0.0, drafted)
            prepared, rank = fan_out_at(accepted, drafted, fan_out), self.dice.choice(self.ranks)
            learner.looked_up(prepared, rank)
            self.hit = rank is not None and rank <= prepared
        learner.outcome(drafted, accepted)

    def _note(self, tokens: int, seconds: float, waited: float, brought: int, beside: bool, plan: Plan) -> None:
        in_turn = plan.mode == "sd"
        self.tuning.note(DecodingRound(1, tokens, seconds, waited, brought, beside, in_turn, plan), self.counters)
        self.tuning.judge()


def depth(found: list[Speculation]) -> float:
    speculating = [s.num_speculative_tokens for s in found if s.mode in DRAFTED]
    return sum(speculating) / max(1, len(speculating))


def share(found: list[Speculation], mode: str) -> float:
    return sum(speculation.mode == mode for speculation in found) / len(found)


def test_numbers_take_the_place_of_auto_from_the_first_round_on() -> None:
    open_ones = (
        AHEAD,
        Speculation("ssd", 0, (2,), "jit"),
        Speculation("ssd", 6, (), "jit"),
        Speculation("sd", 0, (3,), "jit"),
    )
    for asked in (*open_ones, AUTO, Speculation("auto", 3, (), "jit"), Speculation("auto", 3, (2,), "jit")):
        for found in World(0.6).play(200, asked):
            assert found.mode == asked.mode or asked.mode == "auto" != found.mode
            if found.mode in DRAFTED:
                found.check()
                assert msgspec.convert(msgspec.to_builtins(found), Speculation) == found
                joint = found.mode == "ssd" and not asked.fan_out
                lists = 0 if joint else len(asked.fan_out) or found.num_speculative_tokens + 1
                assert len(found.fan_out) == lists
                assert found.chains <= asked.chains and found.num_speculative_tokens <= asked.longest
                assert asked.num_speculative_tokens in (0, found.num_speculative_tokens)


def test_pearl_is_one_chain_at_the_k_that_is_chosen_for_it() -> None:
    asked, depths = Speculation("ssd", 0, (), "jit", allocation="pearl"), dict[float, list[float]]()
    assert asked.chains == 1
    for rate in (0.3, 0.9):
        for seed in range(6):
            found = World(rate, tuning=Tuning(Random(seed))).play(200, asked)
            assert all(one.fan_out == single_chain(one.num_speculative_tokens) for one in found)
            depths.setdefault(rate, []).append(depth(found[100:]))
    assert max(depths[0.3]) < min(depths[0.9])
    assert {one.fan_out for one in World(0.6).play(50, msgspec.structs.replace(asked, num_speculative_tokens=3))} == {
        (0, 0, 0, 1)
    }


def test_plans_ahead_that_are_far_behind_are_ranked_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranking them takes most of the time. With a tuner that knows nothing yet they are at first."""
    ranked, windows = list[tuple[int, bool]](), 70

    def noted(measured: Measurements, batch: int, choices: Choices) -> list[Plan]:
        ranked.append((world.tuning.windows, "ssd" in choices.modes))
        return ranked_plans(measured, batch, choices)

    monkeypatch.setattr(tuner, "ranked_plans", noted)
    for slower, dice, all_of in (
        (6.0, None, {0, 64}),
        (6.0, Random(1), {0, 1, 2, 64}),
        (1.0, None, {0, 1, 2, 4, 8, 16, 32, 64}),
    ):
        world = World(0.6, slower=slower, tuning=Tuning(dice=dice))
        ranked.clear()
        world.play(16 * windows)
        assert {window for window, _ in ranked} == {0, 1, 2, 4, 8, 16, 32, 64}
        assert {window for window, ahead in ranked if ahead} == all_of


def test_without_measurements_pearl_is_one_chain_too() -> None:
    tuning = Tuning()
    tuning.situate([0], DRAFTED)
    assert tuning.current(Speculation("ssd", 0, (), "jit", allocation="pearl")).fan_out == single_chain(2)


def test_where_each_chain_takes_time_one_chain_may_be_chosen() -> None:
    """And it is followed as a list: a joint chain could be that of another outcome."""
    found = World(0.8, step=LinearCost(0.001, 0.025)).play(300, AHEAD)[-50:]
    assert {sum(one.fan_out) for one in found} == {1}


def test_a_good_draft_looks_far_and_a_poor_one_does_not() -> None:
    good, poor = (depth(World(rate).play(600, AHEAD)[300:]) for rate in (0.95, 0.3))
    assert good > 6 and poor < 5


@pytest.mark.parametrize(("rate", "wants"), [(0.95, True), (0.0, False)])
def test_without_a_draft_it_knows_whether_the_plan_would_have_one(rate: float, wants: bool) -> None:
    """By what is expected: a tuner with dice tries a useless draft out now and then."""
    world = World(rate, tuning=Tuning())
    world.play(600)
    world.tuning.situate([0], ())
    world.tuning._chosen.clear()
    assert (world.tuning.plan(AUTO, DRAFTED).mode in DRAFTED) is wants
    assert world.tuning.current(AUTO).mode == "ngram", "there is none to use"


@pytest.mark.parametrize(("in_turn", "beside", "mode"), [(0.005, 0.04, "sd"), (0.012, 0.005, "ssd")])
def test_of_two_drafts_the_faster_one_is_used(in_turn: float, beside: float, mode: Mode) -> None:
    """One works in turn beside the target on a GPU, the other ahead on a host; each may be lost."""
    world = World(0.8, tuning=Tuning())
    steps = {"step": dict.fromkeys(CHAINS, in_turn), "step_beside": dict.fromkeys(CHAINS, beside)}
    verify = {n: VERIFY.at(n) for n in SIZES}
    world.tuning.recall(Knowledge(tables={"verify": verify, "verify_beside": verify, **steps}))
    (other,) = (other for other in DRAFTED if other != mode)
    assert world.tuning.current(AUTO).mode == mode
    for drafted, expected in [((mode,), mode), ((other,), other), ((), "ngram")]:
        world.tuning.situate([0], drafted)
        assert world.tuning.current(AUTO).mode == expected
        assert world.tuning.plan(AUTO, DRAFTED).mode == mode
    del steps["step_beside"]
    anew = Tuning()
    anew.recall(Knowledge(tables={"verify": verify, **steps}))
    anew.situate([0], DRAFTED)
    assert anew.current(AUTO).mode == "sd", "nothing is known of the one that works ahead"


def test_chains_that_take_time_are_few() -> None:
    """As on a CPU that computes as long as it reads; where chains are free there are many."""
    dear, free = (
        World(0.5, LinearCost(0.013, 0.0001), LinearCost(0.0035, each)).play(400, AHEAD)[200:] for each in (0.0006, 0.0)
    )
    assert all(s.chains <= 9 for s in dear) and all(s.chains >= 12 for s in free)


@pytest.mark.parametrize(
    ("world", "fastest"),
    [
        (World(0.9), "ssd"),
        (World(0.5, step=LinearCost(0.045, 0.0), slower=1.2, ranks=(None,)), "ngram"),
        (World(0.8, slower=2.0, step=LinearCost(0.004, 0.0)), "sd"),
    ],
    ids=["a draft on a device of its own", "a draft as slow as the target", "two models on one memory"],
)
def test_the_fastest_mode_serves_the_first_request(world: World, fastest: str) -> None:
    """Acceptance is learned on the way, times are known from the start."""
    assert share(world.play(400)[32:], fastest) > 0.9


def test_a_useless_draft_costs_little() -> None:
    worlds = [World(0.0, slower=1.2, ranks=(None,), tuning=Tuning(Random(seed))) for seed in range(8)]
    runs = [world.play(1500) for world in worlds]
    assert all(share(found, "ngram") > 0.85 for found in runs)
    assert fmean(share(found[500:], "ngram") for found in runs) > 0.97


def test_a_machine_that_is_known_tries_nothing_out() -> None:
    world = World(0.9, tuning=Tuning())
    assert len({(s.mode, s.num_speculative_tokens, s.fan_out) for s in world.play(16)}) == 1
    assert share(world.play(600), "ssd") == 1


def test_a_plan_beside_a_faster_one_comes_with_the_reason() -> None:
    """A draft takes power: 2 % more must be expected of it, and another plan must gain 1 %."""

    def said(step: float, dice: Random | None = None) -> str:
        return World(0.6, step=LinearCost(step, 0.0), slower=3.0, tuning=Tuning(dice)).tuning.described(AUTO)

    reason = "21 with sd, K 1; it stays: over all rounds a change gains less than 3 %"
    assert said(0.0205) == f"plain decoding with prompt lookup: predicted for the next rounds 21 tok/s, {reason}"
    assert ";" not in said(0.015) and ";" not in said(0.025)  # the plan is the fastest
    drawn = [said(0.018, Random(seed)) for seed in range(8)]
    assert {text.partition("; ")[2] for text in drawn} == {"", "plans are tried out"}
    assert all(text.startswith("plain") == text.endswith("; plans are tried out") for text in drawn)


def test_a_machine_that_becomes_slower_is_no_reason_to_change() -> None:
    world = World(0.9)
    world.play(300)
    world.verify, world.step = LinearCost(0.2, 0.002), LinearCost(0.02, 0.0)
    assert share(world.play(600), "ssd") > 0.85  # a window of plain decoding shows that it has become slower, too


def test_a_verification_beside_the_draft_that_becomes_slow_is_seen() -> None:
    """Its table said otherwise."""
    world = World(0.7)
    assert share(world.play(200)[100:], "ssd") == 1
    world.slower = 4.0
    assert share(world.play(1500)[500:], "ssd") < 0.1


def test_a_fixed_mode_is_never_given_up() -> None:
    assert all(s.mode == "ssd" for s in World(0.0).play(500, Speculation("ssd", 4, (), "jit")))
    assert all(s.mode == "sd" for s in World(0.0).play(500, Speculation("sd", 0, (3,), "jit")))


def test_without_a_draft_there_is_nothing_to_choose() -> None:
    world = World(0.9)
    assert share(world.play(64), "ssd") == 1
    world.tuning.situate([0], ())
    assert share(world.play(64), "ngram") == 1
    world.tuning.situate([0], DRAFTED)
    assert share(world.play(64), "ssd") == 1
    assert Tuning().current(AUTO).mode == "ngram"  # nothing is known at all
    assert Tuning().current(AHEAD).num_speculative_tokens == 2


def test_batches_that_come_and_go_are_judged_all_the_same() -> None:
    """Sizes alternate before a window of any of them is full."""
    world = World(0.9, slower=9.0, tuning=Tuning())
    world.tuning.recall(
        Knowledge(
            tables=world.tuning.estimates.costs.written() | {"verify_beside": {1: 0.05, 64: 0.06}, "step": {1: 0.06}}
        )
    )
    modes = []
    for turn in range(400):
        world.tuning.situate([0] * (1 + turn % 2), DRAFTED)
        now = world.tuning.current(AUTO)
        modes.append(now.mode)
        seconds, batch = 0.45 if now.mode == "ssd" else 0.05, 1 + turn % 2
        plan = Plan.of(now)
        world.tuning.note(
            DecodingRound(batch, batch, seconds, 0.0, batch, now.mode == "ssd", False, plan), world.counters
        )
        world.tuning.judge()
    assert modes[0] == "ssd" and "ssd" not in modes[-100:]


def test_each_length_of_text_has_its_own_plan() -> None:
    """A long text slows the draft more than the target, and so much that it is of no use."""
    tuning = World(0.9).tuning
    tuning.estimates.costs.text |= {"verify": 1e-4, "step": 1.0}
    found = []
    for tokens in (100, 4000, 100):
        tuning.situate([0], DRAFTED, tokens)
        found.append(tuning.current(AUTO).mode)
    assert found[0] in DRAFTED and found[1] == "ngram" and found[2] == found[0]


def test_each_batch_size_has_its_own_plan() -> None:
    """One sequence has a machine that computes nothing else; sixteen fill it."""
    tuning = World(0.7, LinearCost(0.010, 0.010), LinearCost(0.001, 0.0)).tuning
    found = []
    for batch in (1, 16):
        tuning.situate([0] * batch, DRAFTED)
        found.append(tuning.plan(AUTO).lookahead)
    assert found[0] > found[1]
    assert [batch_class(batch) for batch in (1, 4, 5, 6, 7, 8, 11, 23, 31)] == [1, 4, 6, 6, 8, 8, 12, 24, 32]


@pytest.mark.parametrize(
    ("steps", "seconds", "grown"), [(4, 0.0, 40), (4, -1.0, 40), (4, 1e9, 4), (4, 0.1, -5), (-3, 1, 1)]
)
def test_counters_that_cannot_be_are_not_believed(steps: int, seconds: float, grown: int) -> None:
    world = World(0.6)
    before = world.tuning.estimates.costs.written()["step_beside"]
    counters = DraftTelemetry(0, steps, seconds, grown)
    world.tuning.note(DecodingRound(1, 5, 0.05, 0.0, 1, True, False, None), counters)
    assert world.tuning.estimates.costs.written()["step_beside"] == before


def test_remembered_text_is_no_merit_of_a_plan() -> None:
    """Such rounds say nothing of it, and, where the draft reads beside the target, nothing of costs."""
    world = World(0.6)
    plan, before = world.tuning.plan(AUTO), world.tuning.knowledge().errors
    for _ in range(100):
        round_ = DecodingRound(1, 17, 0.5, 0.0, 17, False, True, plan, remembered=True, busy=True)
        world.tuning.note(round_, world.counters)
        world.tuning.judge()
    assert world.tuning.windows == 0
    assert world.tuning.knowledge().errors == before
    assert world.tuning.estimates.costs.written() == World(0.6).tuning.estimates.costs.written()
    assert world.tuning.estimates.speed(1) == pytest.approx(17 / 0.5)


def test_a_choice_that_was_wrong_is_given_up_after_a_few_rounds() -> None:
    """The tables say that the draft disturbs nobody. It does."""
    world = World(0.9)
    world.slower = 9.0
    found = [speculation.mode for speculation in world.play(64)]
    assert found[0] == "ssd" and "ssd" not in found[8:]


def test_a_choice_does_not_outlive_what_it_rests_on() -> None:
    """Other requests show that plain decoding is ten times as fast as it was believed to be."""
    tuning = World(0.9).tuning
    assert tuning.current(AUTO).mode == "ssd"
    for _ in range(64):
        tuning.estimates.costs.note("verify", 1, 0.005)
        tuning.estimates.costs._drift["verify_beside"] = 0.0
        tuning.note(None, DraftTelemetry(0, 0, 0.0, 0))
    assert tuning.current(AUTO).mode == "ngram"


def test_a_client_cannot_make_it_remember_everything() -> None:
    tuning = World(0.5).tuning
    for c in range(1000):
        tuning.current(Speculation("ssd", 0, (), "jit", budget=2 + c % 60, saguaro_c=c / 1000, sampler="rejection"))
    assert len(tuning._chosen) <= 65


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (Speculation("ssd", 0, (3, 2, 1), "jit"), "give -k a number"),
        (Speculation("ssd", 8, (), "jit", budget=8), "a budget of 8"),
    ],
)
def test_what_contradicts_itself_is_refused(asked: Speculation, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        asked.check()


def test_bounds_of_what_will_be_chosen() -> None:
    assert (AHEAD.longest, AHEAD.chains) == (AUTO_LOOKAHEAD, 32)
    assert Speculation("ssd", 0, (3,), "jit").chains == 3 * (AUTO_LOOKAHEAD + 1)
    assert Speculation("ssd", 4, (), "jit", budget=20).chains == 20


# -- what outlives a process ------------------------------------------------------------------------------------------


def test_another_process_goes_on_where_one_ended(tmp_path: Path) -> None:
    """Where it knows the texts, it chooses at once what the first one found."""
    world = World(0.2, LinearCost(0.050, 0.005), LinearCost(0.02, 0.0), slower=1.3, ranks=(None, None, 1))
    world.play(2000)
    file = tmp_path / "known.json"
    knowledge.write(file, world.tuning.knowledge())
    known = knowledge.read(file, Knowledge)
    assert known is not None
    later = Tuning()
    later.recall(known)
    later.situate([0], DRAFTED)
    assert later.plan(AUTO).mode == world.tuning.plan(AUTO).mode
    assert later.estimates.learners[0].acceptance[0] == pytest.approx(
        world.tuning.estimates.learners[0].acceptance[0], abs=0.01
    )


def test_a_pairs_prior_serves_until_more_is_known() -> None:
    prior = Knowledge(laws=(Agreement(acceptance=((0.9, 100),), hits=((0.8, 50),), lookup=(0.5, 1.0)),))
    tuning = Tuning()
    tuning.recall(Knowledge(), prior)
    assert tuning.estimates.learners[0].acceptance == (0.9,) and tuning.estimates.learners[1].acceptance == (0.5,)
    tuning.recall(Knowledge(laws=(Agreement(acceptance=((0.3, 100),)),)), prior)
    assert tuning.estimates.learners[0].acceptance == (0.3,)


@pytest.mark.parametrize(
    "content", ["", "{", '{"tables": {"verify": {"1": -1}}}', '{"laws": 1}', '{"errors": {"1 ssd": 99}}', "[" * 9999]
)
def test_a_file_that_says_nothing_sound_is_measured_again(tmp_path: Path, content: str) -> None:
    file = tmp_path / "known.json"
    file.write_text(content)
    assert knowledge.read(file, Knowledge) is None
    assert knowledge.read(tmp_path / "missing.json", Knowledge) is None
    knowledge.write(file / "below a file", Knowledge())  # no error: it is measured again


def test_names_in_a_file_that_nobody_uses_are_harmless() -> None:
    tuning = Tuning()
    errors = {"x ssd": 1.0, "3 unheard": 1.0, "": 0.0, "0 ssd": 1.0, "0 chains": 1.0, "9" * 5000 + " chains": 1.0}
    tuning.recall(Knowledge(tables={"other": {1: 1.0}}, errors=errors))
    assert tuning.current(AUTO).mode == "ngram" and not tuning.knowledge().errors.keys() & errors.keys()


def test_temperatures_of_a_kind() -> None:
    assert [kind_of(temperature) for temperature in (0.0, 0.1, 0.7, 0.8, 1.0)] == [0, 1, 1, 2, 2]
