"""Makes the profile of a pair, for `ssd plan`, from runs of one request at a time (docs/planning.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from ssd.bench.figures import metrics_by_name
from ssd.bench.runs import Runs
from ssd.bench.settings import Setting
from ssd.config.emulation import ForwardTime
from ssd.config.params import DRAFTED, Speculation
from ssd.errors import UsageError
from ssd.ipc.public import Metrics
from ssd.planning import profile
from ssd.planning.profile import PAPER, Misses, Profile, checked
from ssd.speculation.fan_out import miss_law
from ssd.speculation.theory import acceptance_for

_FAN_OUTS = (1, 2, 4)
_EXPONENT = PAPER.misses.r


def fan_out_settings(settings: Sequence[Setting], base: Speculation) -> dict[int, Setting]:
    """Return the extra settings that a profile needs, by fan-out: `ssd`, to measure the miss rate of each.

    Raises UsageError if `settings` cannot make a profile."""
    lookaheads = {s.speculation.num_speculative_tokens for s in settings if s.speculation.mode in DRAFTED}
    if not {"ar", "sd"} <= {setting.name for setting in settings} or 0 in lookaheads:
        raise UsageError("--write-profile needs the modes ar and sd, one K and one temperature: -k 4 --temperature 0")
    (lookahead,) = lookaheads  # with several, "sd" would not be the whole name
    plan = replace(base, mode="ssd", num_speculative_tokens=lookahead, backup="none")
    return {count: Setting(f"ssd F={count}", replace(plan, fan_out=(count,))) for count in _FAN_OUTS}


def write(file: Path, name: str, runs: Runs, by_fan_out: dict[int, Setting], facts: dict[str, Any]) -> None:
    """Write the profile of `runs`, with `facts` as its source. Raises UsageError if runs are missing."""
    metrics = metrics_by_name(runs)
    misses = {count: metrics[setting.name] for count, setting in by_fan_out.items()}
    source = {key: str(value) for key, value in facts.items()}
    profile.write(profile_of(name, metrics["ar"], metrics["sd"], misses, source), file)


class _Rounds(NamedTuple):
    """Means over all rounds of some runs; times in seconds."""

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
    """Return the profile of runs at batch 1: `ar`, `sd` with one K, and `ssd` by fan-out, equal for all lengths.

    `verify` is the line through the rounds of `ar` (1 token) and of `sd` (1 + drafted tokens), including the overhead
    of a round of `ar`. `overhead_s` is the further overhead of a round of `sd`. The acceptance is the single rate that
    gives `sd` its accepted tokens. `assumed` names the figures that could not be measured. Raises UsageError if runs
    are missing."""
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
        verify=ForwardTime(plain.verify + plain.overhead - each, each),
        step=ForwardTime(steps[-1] / 1e3),  # the draft's counters go on from run to run: the last mean is over all
        acceptance=(acceptance_for(1 + turns.accepted, turns.drafted),),
        misses=misses,
        overhead_s=max(0.0, turns.overhead - plain.overhead),
        assumed=assumed | ({"misses": why} if why else {}),
        source=dict(source),
    )


def _misses(by_fan_out: Mapping[int, _Rounds]) -> tuple[Misses, str]:
    """Return c and r of the miss rate c F^-r, and why they had to be assumed, or ""."""
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
