"""Learns from rounds and chooses the plan that requests follow: mode, K and fan-out."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from msgspec.structs import replace

from ssd.config.params import AUTO_LOOKAHEAD, DRAFTED, Mode, Speculation
from ssd.speculation.fan_out import single_chain
from ssd.tuning.choice import CHAINS, Chooser, MemoryShare
from ssd.tuning.costs import NEAR
from ssd.tuning.estimates import DecodingRound, DraftTelemetry, Estimates, Mean, Measurements
from ssd.tuning.knowledge import MOST_ERROR, Knowledge
from ssd.tuning.predictor import Choices, Setting, SpeculationPlan, predicted_plain, ranked_plans, speed_of

# Rounds of a window, after which its plan is judged; windows between two rankings of all plans (at first after 1, 2, 4,
# ... windows, but for plans of `ssd` that are far behind, which take 9 ms, Xeon); and the most windows open at once.
_WINDOW, _RANK_EVERY, _OPEN = 16, 64, 64
# A plan with a draft is judged after this many rounds already, if their speed is below this share of the speed
# predicted for plain decoding.
_EARLY, _FAR_BEHIND = 8, 0.6
# Rounds after which a plan is chosen again, since its measurements may have become better.
_CHOSEN_FOR = 64
_REMEMBERED = 256  # plans
_MEMORY = 1 / 64  # smoothing of the share of the suffix memory


def batch_class(batch: int) -> int:
    """Return the batch size whose plans serve `batch`: 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    if batch <= 4:
        return batch
    power = 1 << (batch.bit_length() - 1)
    return power if batch < 1.25 * power else power * 3 // 2 if batch < 1.75 * power else 2 * power


class PlanKey(NamedTuple):
    """The settings that a plan depends on. `budget`: most chains, if no fan-out is fixed."""

    mode: Mode
    lookahead: int
    fan_out: tuple[int, ...]
    budget: int

    @classmethod
    def of(cls, asked: Speculation) -> PlanKey:
        most = 1 if asked.allocation == "pearl" else asked.budget
        return cls(asked.mode, asked.num_speculative_tokens, asked.fan_out, most)


def setting_of(followed: Speculation) -> Setting:
    if followed.mode not in DRAFTED:
        return followed.mode, 0, 0
    return followed.mode, followed.num_speculative_tokens, sum(followed.fan_out) or followed.budget


def _words(plan: SpeculationPlan, cores: tuple[int, int] | None) -> str:
    own, all_cores = (_counted(count, "core") for count in cores or (0, 0))
    if plan.mode not in DRAFTED:
        return "plain decoding with prompt lookup" + (f" on {all_cores}" if cores else "")
    if plan.mode == "sd":
        return f"sd, K {plan.lookahead}" + (f", in turn on {all_cores}" if cores else "")
    said = f"ssd, K {plan.lookahead}, {_counted(sum(plan.fan_out), 'chain')}"
    return said + (f", target on {own}, draft on {_counted(cores[1] - cores[0], 'core')}" if cores else "")


def _counted(count: int, name: str) -> str:
    return f"{count} {name}" + "s" * (count != 1)


def text_class(tokens: float) -> int:
    """Return the class of texts that share plans: 0 below 512 tokens, 1 below 1,024, ..."""
    return int(tokens // 512).bit_length()


class _PlanCase(NamedTuple):
    """The key of a plan: classes of batch and text, modes that have a draft, kind of request."""

    batch: int
    text: int
    drafted: tuple[Mode, ...]
    key: PlanKey


class _Window:
    """Rounds of one setting, batch size and class of texts since its plan was judged."""

    def __init__(self, batch: int, text: int, setting: Setting | None) -> None:
        self.batch, self.text, self.setting = batch, text, setting
        self.rounds, self.tokens, self.seconds = 0, 0, 0.0

    def add(self, round_: DecodingRound) -> None:
        self.rounds += 1
        self.tokens += round_.brought
        self.seconds += round_.seconds + round_.waited


class Tuning:
    """Keeps the present plan for every kind of request. The proposer reports every round.

    `dice` None: no plan is tried out. `on_trial`: this round tries a number of cores, and says nothing of plans."""

    on_trial = False

    def __init__(self, dice: Random | None = None) -> None:
        self._dice = dice
        self.estimates = Estimates()
        self._choosers: dict[int, Chooser] = {}
        self._ranked: dict[_PlanCase, list[SpeculationPlan]] = {}
        self._plans: dict[_PlanCase, tuple[SpeculationPlan, int]] = {}  # and the round in which it was chosen
        self._given: dict[tuple[Speculation, int], Speculation] = {}  # answers of `current` since the last choice
        self._batch, self._text, self._kinds = 1, 0, [0]
        self._drafted: tuple[Mode, ...] = ()
        # Windows that have begun, by classes and setting, which alternate under load.
        self._open: dict[tuple[int, int, Setting | None], _Window] = {}
        self._window, self.windows = _Window(0, 0, None), 0
        self._ended: _Window | None = None  # but not judged
        self._memory_s, self._other_tokens = Mean(0.0, _MEMORY), Mean(1.0, _MEMORY)

    def recall(self, known: Knowledge, prior: Knowledge | None = None) -> None:
        self.estimates.recall(known, prior)
        for name, error in known.errors.items():
            batch, _, part = name.partition(" ")
            # Without one for chains it is of a version whose errors of `ssd` include that.
            mixed = part == "ssd" and f"{batch} {CHAINS}" not in known.errors
            if re.fullmatch("[1-9][0-9]{0,6}", batch) and not mixed:
                self._chooser(int(batch)).recall(part, error)

    def knowledge(self) -> Knowledge:
        costs, laws = self.estimates.costs, tuple(learner.agreement() for learner in self.estimates.learners)
        errors = {
            f"{batch} {part}": min(max(error, -MOST_ERROR), MOST_ERROR)
            for batch, own in self._choosers.items()
            for part, error in own.errors()
        }
        return Knowledge(laws, costs.written(), errors, costs.written(disturbed=True), costs.text)

    def situate(self, kinds: Sequence[int], drafted: tuple[Mode, ...], tokens: float = NEAR) -> None:
        """Set the rows' kinds of sampling law, the modes with a draft, the tokens of a mean text."""
        batch, text = batch_class(max(1, len(kinds))), text_class(tokens)
        self.estimates.costs.situate(len(kinds), tokens)
        if (batch, text, drafted) != (self._batch, self._text, self._drafted):
            self._given.clear()
        self._batch, self._text, self._kinds, self._drafted = batch, text, list(kinds) or [0], drafted

    def current(self, asked: Speculation, kind: int = 0) -> Speculation:
        """Return the settings that a request follows now: `asked` with open mode and numbers filled in.

        An open fan-out becomes the list of Theorem 12, or as many chains in a joint allocation."""
        if (asked, kind) not in self._given:
            self._given[asked, kind] = self._filled(asked, kind)
        return self._given[asked, kind]

    def _filled(self, asked: Speculation, kind: int) -> Speculation:
        plan = self.plan(PlanKey.of(asked))
        if plan.mode not in DRAFTED:
            return replace(asked, mode=plan.mode)
        asked = replace(asked, mode=plan.mode, num_speculative_tokens=plan.lookahead)
        # Draft probabilities belong to lists, and so does a single chain: a joint one could be of another outcome.
        lists = asked.fan_out or asked.allocation != "joint" or 0 in plan.fan_out
        if plan.mode == "sd" or lists or (kind > 0 and asked.rule().needs_draft_probs):
            return replace(asked, fan_out=plan.fan_out)
        return replace(asked, budget=sum(plan.fan_out))

    def plan(self, key: PlanKey) -> SpeculationPlan:
        place = _PlanCase(self._batch, self._text, self._drafted, key)
        plan, chosen_at = self._plans.get(place, (None, self.estimates.rounds))
        if plan is None or self.estimates.rounds >= chosen_at + _CHOSEN_FOR:
            if len(self._plans) > _REMEMBERED:
                self._plans.clear()
                self._ranked.clear()
                self._given.clear()
            plan = self._chosen(place, None if plan is None else plan.setting)
            self._plans[place] = plan, self.estimates.rounds
        return plan

    def mode_with(self, drafted: tuple[Mode, ...], asked: Speculation) -> Mode:
        """Return the mode of a request's plan, if these modes had a draft."""
        present, self._drafted = self._drafted, drafted
        mode = self.plan(PlanKey.of(asked)).mode
        self._drafted = present
        return mode

    def prepare(self, asked: Speculation) -> None:
        """Rank the plans of a single request, so that the first one need not wait."""
        if asked.auto and self.estimates.costs.of("verify") is not None:
            self.situate([0], ())
            self.mode_with(DRAFTED, asked)

    # -- learning from rounds -------------------------------------------------------------------------------------

    def note(self, round_: DecodingRound | None, draft: DraftTelemetry) -> None:
        """Learn from a round; a window that it ends waits for `judge`."""
        if self.on_trial:
            round_ = None
        self.estimates.note(round_, draft)
        if round_ is not None:
            self._memory_s.note(round_.seconds + round_.waited if round_.remembered else 0.0)
            self._other_tokens.note(0 if round_.remembered else round_.brought)
        if round_ is not None and not round_.remembered:
            followed = batch_class(round_.batch), self._text, round_.setting
            if followed not in self._open and len(self._open) >= _OPEN:
                self._open.clear()
            self._window = self._open.setdefault(followed, _Window(*followed))
            self._window.add(round_)
        if self.estimates.rounds % _CHOSEN_FOR == 0:
            self._given.clear()
        if self._window.rounds >= _WINDOW or (self._window.rounds == _EARLY and self._far_behind(self._window)):
            self._ended, self._window = self._window, _Window(0, 0, None)
            del self._open[self._ended.batch, self._ended.text, self._ended.setting]

    def _far_behind(self, window: _Window) -> bool:
        measured = self._measurements(None) if window.setting is not None and window.setting[0] in DRAFTED else None
        plain = 0.0 if measured is None else predicted_plain(measured, window.batch)
        return window.tokens < _FAR_BEHIND * window.seconds * plain

    def judge(self) -> None:
        """Learn from a window that has ended, and choose the next plans of its requests."""
        window, self._ended = self._ended, None
        if window is None:
            return
        followed = [
            (place, plan)
            for place, (plan, _) in self._plans.items()
            if (*place[:3], plan.setting) == (window.batch, window.text, self._drafted, window.setting)
        ]
        if not followed:
            return
        self.windows += 1
        (place, plan), *_ = followed
        measured = self._measurements(place.key)
        if measured is not None:
            plan = plan._replace(speed=speed_of(measured, window.batch, plan))
            self._chooser(window.batch).note(plan, window.tokens / window.seconds, window.tokens)
        self._given.clear()
        for place, plan in followed:
            self._plans[place] = self._chosen(place, plan.setting), self.estimates.rounds

    # -- choosing -------------------------------------------------------------------------------------------------

    def _chosen(self, place: _PlanCase, present: Setting | None) -> SpeculationPlan:
        """Choose the next plan; without measurements the one that costs least if wrong."""
        batch, key = place.batch, place.key
        measured = self._measurements(key)
        choices = self._choices(key)
        if measured is None:
            lookahead = 0 if choices.modes[0] not in DRAFTED else key.lookahead or 2
            one_each = (1,) * (lookahead + 1) if key.budget > lookahead else single_chain(lookahead)
            return SpeculationPlan(choices.modes[0], lookahead, key.fan_out or one_each, 0.0)
        chooser, known = self._chooser(batch), self._ranked.get(place, [])
        due = self.windows % _RANK_EVERY == 0 or self.windows & (self.windows - 1) == 0
        if not known or (present is not None and due):
            learned = self._dice is None or self.windows > 2
            ahead = [plan for plan in known if plan.mode == "ssd" and learned and self.windows % _RANK_EVERY]
            far = [] if not ahead or {*ahead} & {*chooser.candidates(known, present)} else ahead
            modes = tuple(mode for mode in choices.modes if mode != "ssd" or not far)
            self._ranked[place] = [*ranked_plans(measured, batch, choices._replace(modes=modes)), *far]
        near = chooser.candidates(self._ranked[place], present)
        share = MemoryShare(self._memory_s.value, self._other_tokens.value)
        return chooser.choose([plan._replace(speed=speed_of(measured, batch, plan)) for plan in near], present, share)

    def choice(self, key: PlanKey) -> list[tuple[SpeculationPlan, float]]:
        """Return the present plan of a kind of request, then the best of another mode, if any.

        Each comes with its expected tokens per second, 0 while nothing is measured."""
        plan, chooser, measured = self.plan(key), self._chooser(self._batch), self._measurements(key)
        ranked = self._ranked.get(_PlanCase(self._batch, self._text, self._drafted, key), [])
        best_of = {other.mode: other for other in sorted(ranked, key=chooser.expected)}  # the fastest comes last
        others = [other for mode, other in best_of.items() if mode != plan.mode]
        if measured is None or not others or not plan.speed:
            return [(plan, chooser.expected(plan))]
        speeds = {o: chooser.expected(o._replace(speed=speed_of(measured, self._batch, o))) for o in others}
        best = max(others, key=speeds.__getitem__)
        return [(plan, chooser.expected(plan)), (best, speeds[best])]

    def described(self, key: PlanKey, cores: tuple[int, int] | None = None) -> str:
        """Describe the present plan and its reason; `cores`: the target's own, and all."""
        (plan, speed), *others = self.choice(key)
        said = _words(plan, cores)
        if not plan.speed:
            return f"{said}: nothing is measured yet"
        said += f": predicted for the next rounds {speed:.0f} tok/s"
        if not self._drafted and key.mode == "auto":
            return f"{said}; there is no draft in use"
        return ", ".join([said, *(f"{speed:.0f} with {_words(other, None)}" for other, speed in others)])

    def _choices(self, key: PlanKey) -> Choices:
        costs = self.estimates.costs
        measured = {"sd": costs.of("step") is not None, "ssd": costs.of("step_beside") is not None}
        modes: tuple[Mode, ...] = (key.mode,)
        if key.mode == "auto":
            modes = ("ngram", *(mode for mode in self._drafted if measured[mode]))
        lookaheads = (key.lookahead,) if key.lookahead else tuple(range(1, AUTO_LOOKAHEAD + 1))
        return Choices(modes, lookaheads, key.fan_out, key.budget)

    def _chooser(self, batch: int) -> Chooser:
        if batch not in self._choosers:
            nearest = min(self._choosers, key=lambda known: abs(math.log(known / batch)), default=None)
            self._choosers[batch] = Chooser(self._dice, None if nearest is None else self._choosers[nearest])
        return self._choosers[batch]

    def _measurements(self, key: PlanKey | None) -> Measurements | None:
        kind, gives_k = max(set(self._kinds), key=self._kinds.count), key is not None and key.lookahead > 0
        return self.estimates.measurements(kind, bool(self._drafted), ends=self.estimates.ends and not gives_k)
