"""From the metrics of runs in each mode to a profile of the pair (docs/planning.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ssd.errors import UsageError
from ssd.ipc.messages import Metrics
from ssd.profile import PAPER, Misses, Profile, Times, checked
from ssd.speculation.fan_out import miss_law
from ssd.speculation.theory import acceptance_for

_EXPONENT = PAPER.misses.r


class _Rounds(NamedTuple):
    """Means per round over all rounds of some runs; times in seconds."""

    verify: float
    overhead: float
    drafted: float
    accepted: float
    hits: float
    looked_up: int

    @classmethod
    def of(cls, mode: str, runs: Sequence[Metrics]) -> _Rounds:
        rounds = sum(run.rounds for run in runs)
        if not rounds:
            raise UsageError(f"a profile needs rounds of {mode}: there was none")
        looked_up = sum(run.hits + run.misses for run in runs)
        return cls(
            sum(run.verify_ms * run.rounds for run in runs) / rounds / 1e3,
            sum(run.round_overhead_ms * run.rounds for run in runs) / rounds / 1e3,
            sum(run.drafted_tokens for run in runs) / rounds,
            sum(run.accepted_tokens for run in runs) / rounds,
            sum(run.hits for run in runs) / max(1, looked_up),
            looked_up,
        )


def profile_of(
    name: str,
    ar: Sequence[Metrics],
    sd: Sequence[Metrics],
    ssd: Mapping[int, Sequence[Metrics]],
    source: Mapping[str, str],
) -> Profile:
    """The profile of runs at batch 1: `ar`, `sd` with one K, `ssd` by fan-out, the same one for every accepted length.

    `verify` is the line through the rounds of `ar` (1 token) and of `sd` (1 + drafted tokens), with the overhead that
    rounds of `ar` have; `overhead_s` is what `sd` has beyond it. The acceptance is the one rate that gives `sd` its
    accepted tokens. `assumed` says what could not be measured. Raises UsageError where runs are missing.
    """
    plain, turns = _Rounds.of("ar", ar), _Rounds.of("sd", sd)
    if not turns.drafted:
        raise UsageError("a profile needs draft tokens in sd: there was none")
    steps = [run.draft_step_ms for runs in ssd.values() for run in runs if run.draft_step_ms]
    if not steps:
        raise UsageError("a profile needs runs of ssd whose draft made steps: there was none")
    each = (turns.verify - plain.verify) / turns.drafted
    assumed = {
        "step": "each chain costs nothing: one mean step over all runs is known",
        "acceptance": "one rate for all positions: rates by position are not in the metrics",
        "target_gpus": "1",
        "draft_gpus": "1",
    }
    if each < 0:
        assumed["verify"] = "a further token costs nothing: more tokens took less time, which is noise"
    each = min(max(0.0, each), plain.verify + plain.overhead)
    misses, why = _misses({fan_out: _Rounds.of("ssd", runs) for fan_out, runs in ssd.items()})
    return checked(
        name=name,
        verify=Times(plain.verify + plain.overhead - each, each),
        step=Times(steps[-1] / 1e3),  # the draft's counters go on from run to run: the last mean is over all
        acceptance=(acceptance_for(1 + turns.accepted, turns.drafted),),
        misses=misses,
        overhead_s=max(0.0, turns.overhead - plain.overhead),
        assumed=assumed | ({"misses": why} if why else {}),
        source=dict(source),
    )


def _misses(by_fan_out: Mapping[int, _Rounds]) -> tuple[Misses, str]:
    """The law of misses, and what of it had to be assumed."""
    rates = {fan_out: 1 - rounds.hits for fan_out, rounds in by_fan_out.items() if rounds.looked_up}
    if not rates:
        return PAPER.misses, f"{PAPER.misses.c} F^-{PAPER.misses.r}, {PAPER.name}'s: no outcome was looked up"
    try:
        c, r = miss_law(rates)
        if r >= 0:
            return Misses(c, r), ""
        reason = "more candidates missed more, which is noise"
    except ValueError:
        reason = "fewer than two fan-outs had misses"
    fan_out = min(rates)
    return Misses(rates[fan_out] * fan_out**_EXPONENT, _EXPONENT), f"r is {PAPER.name}'s, {_EXPONENT}: {reason}"
