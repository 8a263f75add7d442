"""The profile of a pair as the engine has measured it on this machine (`ssd.tuning.knowledge`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ssd.config.engine import EngineConfig
from ssd.errors import UsageError
from ssd.kernels import build
from ssd.planning.profile import Misses, Points, Profile
from ssd.tuning import draft_format, knowledge
from ssd.tuning.costs import SITUATIONS
from ssd.tuning.knowledge import PRIOR_FILE, Knowledge
from ssd.tuning.learner import Learner
from ssd.tuning.rounds import kind_of


def profile_here(config: EngineConfig, temperature: float) -> tuple[Profile, Path]:
    """Return what was measured of a pair that is placed like this, and the file that has it.

    Acceptance and misses are those of the temperature's kind: learned here, else the draft's prior, else the tuner's
    first guess. Raises UsageError without a draft, or where forwards have not been measured yet."""
    if config.draft is None:
        raise UsageError(f"there is no draft for {config.target_name}: give --draft")
    file = knowledge.file_of(config, str(build.library()))
    known = knowledge.read(file, Knowledge)
    pair = f"{config.target_name} and {config.draft_name}, placed like this"
    if known is None:
        raise UsageError(f"nothing was measured yet of {pair}: start them once, as with ssd generate (no file {file})")
    if not all(known.tables.get(situation) for situation in SITUATIONS):
        raise UsageError(f"{file} has no times of {pair}: they were disturbed or are chosen by hand; start them again")
    learner, assumption = _agreement(
        known, knowledge.read(Path(config.draft) / PRIOR_FILE, Knowledge), kind_of(temperature)
    )
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
        source={"tables": str(file)},
    )
    return profile, file


def draft_format_here(config: EngineConfig) -> str | None:
    """Return the format that the draft computes in by what was measured here; None where no file tells it."""
    found = draft_format.chosen(config, str(build.library()))
    return None if found is None else str(found)


def _points(table: Mapping[int, float]) -> Points:
    return tuple(sorted(table.items()))


def _agreement(known: Knowledge, prior: Knowledge | None, kind: int) -> tuple[Learner, str]:
    """Return the acceptance and hits of a kind of sampling law, and what stands in for a measurement of them, if any.

    An engine that begins with a prior keeps it among what it knows, so a law like the prior's was not learned here."""
    learned, given = known.law(kind), (prior or Knowledge()).law(kind)
    learner, found = Learner(), learned if learned.sampled else given
    if not found.sampled:
        return learner, "the tuner's first guess"
    learner.recall(found.acceptance, found.hits)
    compared = (found, given) if given.sampled else ()
    rates = [[rate for rate, _ in each.acceptance[: len(given.acceptance)]] for each in compared]
    return learner, f"the draft's {PRIOR_FILE}" if rates and rates[0] == rates[1] else ""
