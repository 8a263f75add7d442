"""The profile of a pair as the engine has measured it on this machine (`ssd.tuning.knowledge`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from ssd.config.engine import EngineConfig
from ssd.config.params import Mode, Speculation
from ssd.errors import UsageError
from ssd.kernels import build
from ssd.planning.grid import Pair
from ssd.planning.profile import Misses, Points, Profile
from ssd.tuning import draft_format, knowledge
from ssd.tuning.choice import DRAFT_MARGIN
from ssd.tuning.core_count import LITTLE
from ssd.tuning.costs import SITUATIONS
from ssd.tuning.estimates import Learner, kind_of
from ssd.tuning.knowledge import PRIOR_FILE, Knowledge
from ssd.tuning.tuner import Tuning

FIRST_GUESS = "the tuner's first guess"
"""The source of an acceptance that neither this machine nor the draft's own file knows."""
_MOST_CORES = 16  # up to which plain decoding is predicted


class Gain(NamedTuple):
    """The fastest mode with a draft at a batch size. `ratio`: its speed over the best mode without one."""

    batch: int
    mode: Mode
    lookahead: int
    ratio: float

    @property
    def pays(self) -> bool:
        """Return True if the ratio exceeds the margin that `auto` asks for."""
        return self.ratio > math.exp(DRAFT_MARGIN)


class CoreSpeed(NamedTuple):
    """The tokens per second of plain decoding, batch 1, on this number of cores."""

    cores: int
    speed: float
    measured: bool


def cores_that_help(speeds: Sequence[CoreSpeed]) -> int | None:
    """Return the cores beyond which a doubling is not worth it (`ssd.tuning.core_count`); None if all are."""
    pairs = ((fewer, more) for fewer, more in pairwise(speeds) if more.cores == 2 * fewer.cores)
    return next((fewer.cores for fewer, more in pairs if more.speed < LITTLE * fewer.speed), None)


@dataclass(frozen=True)
class MeasuredPair:
    """Measurements of a pair on this machine, read from `file`: as a profile, and in the tuner.

    `rough`: other programs disturbed the measuring. `cores`: seconds of a verification of one token by cores. `shares`:
    the number of the target's own cores, and of all."""

    profile: Profile
    file: Path
    rough: bool
    tuning: Tuning
    asked: Speculation
    kind: int
    cores: Mapping[int, float]
    shares: tuple[int, int]

    def by_cores(self) -> list[CoreSpeed]:
        """Return the speed of plain decoding by cores, as far as measured, and predicted up to `_MOST_CORES`.

        The prediction adds time that no core shortens to time that all share, by the last two that were measured."""
        # The table's time of a row on all cores may come from another moment; both lines of a plan must agree.
        now = self.profile.pair().alone_s(1) / self.cores[max(self.cores)] if len(self.cores) > 1 else 1.0
        seconds = {count: now * taken for count, taken in self.cores.items()}
        seconds |= {count: now * self._taken(count) for count in self._more_cores()}
        return [CoreSpeed(count, 1 / seconds[count], count in self.cores) for count in sorted(seconds)]

    def on_more_cores(self) -> dict[int, Pair]:
        """Return the pair as predicted by cores. Ahead the draft keeps its own; in turn its steps gain as `ar` does."""
        own, every = self.shares
        found = {}
        for count in self._more_cores() if own < every else ():
            turn, ahead = (
                self._taken(n) / self._taken(here) for n, here in ((count, every), (count + own - every, own))
            )
            found[count] = replace(
                self.profile,
                verify=_scaled(self.profile.verify, ahead),
                verify_alone=_scaled(self.profile.verify_alone, turn),
                step_alone=_scaled(self.profile.step_alone, turn),
            ).pair()
        return found

    def _more_cores(self) -> list[int]:
        counts = [1 << power for power in range(_MOST_CORES.bit_length())]
        return [count for count in counts if len(self.cores) > 1 and count > max(self.cores)]

    def _taken(self, count: int) -> float:
        """Return the seconds of a verification: a part that no core shortens, and one that all share."""
        fewer, most = sorted(self.cores)[-2:]
        shared = max(0.0, (self.cores[fewer] - self.cores[most]) / (1 / fewer - 1 / most))
        return max(0.0, self.cores[most] - shared / most) + shared / count

    def gain(self, batch: int) -> Gain:
        """Return the gain that the tuner expects of a draft for `batch` requests."""
        self.tuning.situate([self.kind] * batch, True)
        plan, ratio = self.tuning.draft_gain(self.asked)
        return Gain(batch, plan.mode, plan.lookahead, ratio)


def is_measured(config: EngineConfig, rough: bool = False) -> bool:
    """Return True if all forwards of a pair placed like this were measured, or with `rough` even disturbed."""
    known = knowledge.read(knowledge.file_of(config, str(build.library())), Knowledge)
    return known is not None and (_complete(known.tables) or (rough and _complete(known.rough)))


def _complete(tables: Mapping[str, Mapping[int, float]]) -> bool:
    return all(tables.get(situation) for situation in SITUATIONS)


def measured_here(config: EngineConfig, temperature: float) -> MeasuredPair:
    """Return the measurements of a pair that is placed like this.

    Acceptance and misses are those of the temperature's kind: learned here, else the draft's prior, else the tuner's
    first guess. Raises UsageError without a draft, or where forwards have not been measured yet."""
    if config.draft is None:
        raise UsageError(f"there is no draft for {config.target_name}: give --draft")
    file = knowledge.file_of(config, str(build.library()))
    known = knowledge.read(file, Knowledge)
    if known is None or not is_measured(config, rough=True):
        raise UsageError(f"{file} has no times of {config.target_name} and {config.draft_name}: start them again")
    rough = not _complete(known.tables)
    if rough:
        known = replace(known, tables=known.rough)
    prior, kind = knowledge.read(Path(config.draft) / PRIOR_FILE, Knowledge), kind_of(temperature)
    learner, assumption = _agreement(known, prior, kind)
    tuning = Tuning()
    tuning.recall(known, prior)
    assumed = {"overhead_s": "part of the forwards", "target_gpus": "one", "draft_gpus": "one"}
    shared = config.one_bus or config.draft_device == "cpu"
    if shared:
        assumed["draft_gpus"] = "it takes none of its own"
    if assumption:
        assumed |= dict.fromkeys(("acceptance", "misses"), assumption)
    profile = Profile(
        name=f"{config.target_name} and {config.draft_name} on this machine at temperature {temperature:g}",
        verify=_points(known.tables["verify_beside"]),
        step=_points(known.tables["step_beside"]),
        verify_alone=_points(known.tables["verify"]),
        step_alone=_points(known.tables["step"]),
        acceptance=learner.acceptance,
        misses=Misses(*learner.misses()),
        target_gpus=1.0 if config.device == "cpu" else float(config.tensor_parallel_size),
        draft_gpus=0.0 if shared else 1.0,
        assumed=assumed,
        source={"tables": str(file), **({"rough": "other programs disturbed the measuring"} if rough else {})},
    )
    shares = config.core_counts("target")
    return MeasuredPair(profile, file, rough, tuning, config.speculation, kind, known.cores, shares)


def draft_format_here(config: EngineConfig) -> str | None:
    """Return the format that the draft computes in: its only one, or the fastest measured here; None if unknown."""
    found = draft_format.chosen(config, str(build.library()))
    return None if found is None else str(found)


def _scaled(points: Any, by: float) -> Points:
    return tuple((size, by * seconds) for size, seconds in points)


def _points(table: Mapping[int, float]) -> Points:
    return tuple(sorted(table.items()))


def _agreement(known: Knowledge, prior: Knowledge | None, kind: int) -> tuple[Learner, str]:
    """Return the acceptance and hits of a kind of sampling law, and their source if they were not measured here.

    An engine that begins with a prior stores it with what it learns: acceptance equal to the prior's was not learned
    here."""
    learned, given = known.law(kind), (prior or Knowledge()).law(kind)
    learner, found = Learner(), learned if learned.sampled else given
    if not found.sampled:
        return learner, FIRST_GUESS
    learner.recall(found)
    compared = (found, given) if given.sampled else ()
    rates = [[rate for rate, _ in each.acceptance[: len(given.acceptance)]] for each in compared]
    return learner, f"the draft's {PRIOR_FILE}" if rates and rates[0] == rates[1] else ""
