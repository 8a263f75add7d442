"""Learns from rounds and chooses the plan that requests follow: mode, K and fan-out."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

import msgspec

from ssd.config.params import DRAFTED, Mode, Speculation
from ssd.speculation.fan_out import single_chain
from ssd.tuning.choice import Chooser, MemoryShare, margin
from ssd.tuning.costs import NEAR
from ssd.tuning.estimates import DecodingRound, DraftTelemetry, Estimates, Mean, Measurements
from ssd.tuning.knowledge import MOST_ERROR, Knowledge
from ssd.tuning.plan import Choices, Plan, batch_class, text_class
from ssd.tuning.predictor import predicted_plain, ranked_plans, speed_of

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


class _Case(NamedTuple):
    """The circumstances of a plan: classes of batch and text, modes that have a draft, what is left open."""

    batch: int
    text: int
    drafted: tuple[Mode, ...]
    choices: Choices


@dataclass
class _Chosen:
    """The plan of a case, the round in which it was chosen, and all plans as they were ranked last."""

    plan: Plan
    at: int
    ranked: list[Plan]


@dataclass
class _Window:
    """Rounds of one plan, batch size and class of texts since the plan was judged; plan None: of no single one."""

    batch: int
    text: int
    plan: Plan | None
    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def add(self, round_: DecodingRound) -> None:
        self.rounds += 1
        self.tokens += round_.brought
        self.seconds += round_.seconds + round_.waited


class Tuning:
    """Keeps the present plan for every kind of request. The proposer reports every round.

    `dice` None: no plan is tried out."""

    def __init__(self, dice: Random | None = None) -> None:
        self._dice = dice
        self.estimates = Estimates()
        self._choosers: dict[int, Chooser] = {}
        self._chosen: dict[_Case, _Chosen] = {}
        self._batch, self._text, self._kinds = 1, 0, [0]
        self._drafted: tuple[Mode, ...] = ()
        self._cores_on_trial = False
        # Windows that have begun, by classes and plan, which alternate under load.
        self._open: dict[tuple[int, int, Plan | None], _Window] = {}
        self._window, self.windows = _Window(0, 0, None), 0
        self._ended: _Window | None = None  # but not judged
        self._memory_s, self._other_tokens = Mean(0.0, _MEMORY), Mean(1.0, _MEMORY)

    def recall(self, known: Knowledge, prior: Knowledge | None = None) -> None:
        self.estimates.recall(known, prior)
        for name, error in known.errors.items():
            batch, _, part = name.partition(" ")
            if re.fullmatch("[1-9][0-9]{0,6}", batch):
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
        self.estimates.costs.situate(len(kinds), tokens)
        self._batch, self._text = batch_class(max(1, len(kinds))), text_class(tokens)
        self._kinds, self._drafted = list(kinds) or [0], drafted

    def current(self, asked: Speculation, kind: int = 0) -> Speculation:
        """Return the speculation that a request follows now: `asked` with open mode and numbers filled in.

        An open fan-out becomes the list of Theorem 12, or as many chains in a joint allocation."""
        plan = self.plan(asked)
        if plan.mode not in DRAFTED:
            return msgspec.structs.replace(asked, mode=plan.mode)
        # Draft probabilities belong to lists, and so does a single chain: a joint one could be of another outcome.
        lists = asked.fan_out or asked.allocation != "joint" or 0 in plan.fan_out
        listed = plan.mode == "sd" or lists or (kind > 0 and asked.rule().needs_draft_probs)
        fan_out = {"fan_out": plan.fan_out} if listed else {"budget": plan.chains}
        return msgspec.structs.replace(asked, mode=plan.mode, num_speculative_tokens=plan.lookahead, **fan_out)

    def plan(self, asked: Speculation, drafted: tuple[Mode, ...] | None = None) -> Plan:
        """Return the plan of requests that ask for this; `drafted`: as if these modes had a draft."""
        case = self._case(asked, self._drafted if drafted is None else drafted)
        chosen = self._chosen.get(case)
        if chosen is None or self.estimates.rounds >= chosen.at + _CHOSEN_FOR:
            if len(self._chosen) > _REMEMBERED:
                self._chosen.clear()
            chosen = self._chosen[case] = self._choose(case, chosen)
        return chosen.plan

    def _case(self, asked: Speculation, drafted: tuple[Mode, ...]) -> _Case:
        return _Case(self._batch, self._text, drafted, Choices.of(asked))

    def prepare(self, asked: Speculation) -> None:
        """Rank the plans of a single request, so that the first one need not wait."""
        if asked.auto and self.estimates.costs.of("verify") is not None:
            self.situate([0], ())
            self.plan(asked, DRAFTED)

    def try_cores(self, trying: bool) -> None:
        """Note if the present rounds try a number of cores (`ssd.verifier.core_choice`): they say nothing of plans."""
        self._cores_on_trial = trying

    # -- learning from rounds -------------------------------------------------------------------------------------

    def note(self, round_: DecodingRound | None, draft: DraftTelemetry) -> None:
        """Learn from a round; a window that it ends waits for `judge`."""
        if self._cores_on_trial:
            round_ = None
        self.estimates.note(round_, draft)
        if round_ is not None:
            self._memory_s.note(round_.seconds + round_.waited if round_.remembered else 0.0)
            self._other_tokens.note(0 if round_.remembered else round_.brought)
        if round_ is not None and not round_.remembered:
            followed = batch_class(round_.batch), self._text, round_.plan
            if followed not in self._open and len(self._open) >= _OPEN:
                self._open.clear()
            self._window = self._open.setdefault(followed, _Window(*followed))
            self._window.add(round_)
        if self._window.rounds >= _WINDOW or (self._window.rounds == _EARLY and self._far_behind(self._window)):
            self._ended, self._window = self._window, _Window(0, 0, None)
            del self._open[self._ended.batch, self._ended.text, self._ended.plan]

    def _far_behind(self, window: _Window) -> bool:
        measured = self._measurements() if window.plan is not None and window.plan.mode in DRAFTED else None
        plain = 0.0 if measured is None else predicted_plain(measured, window.batch)
        return window.tokens < _FAR_BEHIND * window.seconds * plain

    def judge(self) -> None:
        """Learn from a window that has ended, and choose the next plans of its requests."""
        window, self._ended = self._ended, None
        if window is None:
            return
        of = window.batch, window.text, self._drafted, window.plan
        followed = [(case, chosen) for case, chosen in self._chosen.items() if (*case[:3], chosen.plan) == of]
        if not followed:
            return
        self.windows += 1
        case, chosen = followed[0]
        measured = self._measurements(case)
        if measured is not None:
            plan = replace(chosen.plan, speed=speed_of(measured, window.batch, chosen.plan))
            self._chooser(window.batch).note(plan, window.tokens / window.seconds, window.tokens)
        for case, chosen in followed:
            self._chosen[case] = self._choose(case, chosen)

    # -- choosing -------------------------------------------------------------------------------------------------

    def _choose(self, case: _Case, before: _Chosen | None) -> _Chosen:
        """Choose the next plan; without measurements the one that costs least if wrong."""
        batch, choices, rounds = case.batch, self._choices(case), self.estimates.rounds
        measured, (present, ranked) = self._measurements(case), (before.plan, before.ranked) if before else (None, [])
        if measured is None:
            mode, lookahead = choices.modes[0], choices.lookahead or 2
            if mode not in DRAFTED:
                return _Chosen(Plan(mode), rounds, ranked)
            one_each = (1,) * (lookahead + 1) if choices.chains > lookahead else single_chain(lookahead)
            fan_out = choices.fan_out or one_each
            return _Chosen(Plan(mode, lookahead, sum(fan_out), fan_out), rounds, ranked)
        chooser = self._chooser(batch)
        if not ranked or self.windows % _RANK_EVERY == 0 or self.windows & (self.windows - 1) == 0:
            learned = self._dice is None or self.windows > 2
            ahead = [plan for plan in ranked if plan.mode == "ssd" and learned and self.windows % _RANK_EVERY]
            far = [] if not ahead or {*ahead} & {*chooser.candidates(ranked, present)} else ahead
            modes = tuple(mode for mode in choices.modes if mode != "ssd" or not far)
            ranked = [*ranked_plans(measured, batch, choices._replace(modes=modes)), *far]
        near = [replace(p, speed=speed_of(measured, batch, p)) for p in chooser.candidates(ranked, present)]
        return _Chosen(chooser.choose(near, present, self._memory_share), rounds, ranked)

    @property
    def _memory_share(self) -> MemoryShare:
        return MemoryShare(self._memory_s.value, self._other_tokens.value)

    def choice(self, asked: Speculation) -> list[tuple[Plan, float]]:
        """Return the present plan of a kind of request, then the best of another mode, if any.

        Each comes with its expected tokens per second, 0 while nothing is measured."""
        case, plan, chooser = self._case(asked, self._drafted), self.plan(asked), self._chooser(self._batch)
        measured, chosen = self._measurements(case), self._chosen.get(case)
        ranked = [] if chosen is None else chosen.ranked
        best_of = {other.mode: other for other in sorted(ranked, key=chooser.expected)}  # the fastest comes last
        others = [other for mode, other in best_of.items() if mode != plan.mode]
        if measured is None or not others or not plan.speed:
            return [(plan, chooser.expected(plan))]
        others = [replace(other, speed=speed_of(measured, self._batch, other)) for other in others]
        return [(p, chooser.expected(p)) for p in (plan, max(others, key=chooser.expected))]

    def described(self, asked: Speculation, cores: tuple[int, int] | None = None) -> str:
        """Describe the present plan and its reason; `cores`: the target's own, and all."""
        (plan, speed), *others = self.choice(asked)
        said = plan.words(cores)
        if not plan.speed:
            return f"{said}: nothing is measured yet"
        said += f": predicted for the next rounds {speed:.0f} tok/s"
        if not self._drafted and asked.mode == "auto":
            return f"{said}; there is no draft in use"
        for other, faster in others:
            said += f", {faster:.0f} with {other.words()}" + (self._reason(plan, other) if faster > speed else "")
        return said

    def _reason(self, plan: Plan, faster: Plan) -> str:
        """Return why a plan is followed beside one that is expected to be faster."""
        if self._dice is not None:
            return "; plans are tried out"
        if self._chooser(self._batch).choose([plan, faster], plan, self._memory_share) != plan:
            return "; the next choice may take that"
        least = margin(plan, plan) - margin(faster, plan)
        return f"; it stays: over all rounds a change gains less than {100 * least:.0f} %"

    def _choices(self, case: _Case) -> Choices:
        """Return what is left open, without modes whose draft is not there or not measured."""
        costs, choices = self.estimates.costs, case.choices
        if len(choices.modes) == 1:
            return choices
        measured = {"sd": costs.of("step") is not None, "ssd": costs.of("step_beside") is not None}
        modes = (mode for mode in choices.modes if mode == "ngram" or (mode in case.drafted and measured[mode]))
        return choices._replace(modes=tuple(modes))

    def _chooser(self, batch: int) -> Chooser:
        if batch not in self._choosers:
            nearest = min(self._choosers, key=lambda known: abs(math.log(known / batch)), default=None)
            self._choosers[batch] = Chooser(self._dice, None if nearest is None else self._choosers[nearest])
        return self._choosers[batch]

    def _measurements(self, case: _Case | None = None) -> Measurements | None:
        kind, gives_k = max(set(self._kinds), key=self._kinds.count), case is not None and case.choices.lookahead > 0
        drafted = self._drafted if case is None else case.drafted
        return self.estimates.measurements(kind, bool(drafted), ends=self.estimates.ends and not gives_k)
