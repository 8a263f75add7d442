"""Turns runs into figures: one row for each setting."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ssd.client import Completion
from ssd.config.params import DRAFTED
from ssd.ipc.public import Metrics
from ssd.plugins.bench.runs import BenchTurn, Runs
from ssd.plugins.bench.settings import Setting, fan_out_text
from ssd.speculation.theory import speedup_sd, speedup_ssd

Row = dict[str, Any]
DISTURBED = 'Other programs disturbed what says "at most": no real gain is larger than the acceptance length.'


def rows(settings: Sequence[Setting], runs: Runs, temperature: float) -> list[Row]:
    """Return a row of figures for each setting, in order.

    Speeds are medians over turns, ratios over pairs of turns, the rest means over requests."""
    return [_row(setting, settings, runs, temperature) for setting in settings]


def described(setting: Setting, temperature: float) -> Row:
    speculation = setting.speculation
    row: Row = {"mode": setting.name, "temperature": temperature}
    if speculation.mode == "ar":
        return row
    row["sampler"] = speculation.sampler
    if speculation.mode != "ngram":
        row["k"] = speculation.num_speculative_tokens or "auto"
    if speculation.mode in ("ssd", "auto"):
        row |= {"fan_out": fan_out_text(speculation.fan_out_choice), "backup": speculation.backup}
    return row


def _row(setting: Setting, settings: Sequence[Setting], runs: Runs, temperature: float) -> Row:
    turns = runs[setting.name]
    speeds = [turn.tok_s for turn in turns if turn.tok_s] or [0.0]
    answers = _answers(turns)
    metrics = [answer.metrics for answer in answers if answer.metrics.rounds] or [answers[-1].metrics]
    row = {
        **described(setting, temperature),
        "tok_s": statistics.median(speeds),
        "tok_s_quartiles": quartiles(speeds),
        **{key: _ratio(turns, runs[name]) for key, name in _others(setting, settings, runs).items()},
        "acceptance_length": _mean(metrics, "mean_acceptance_length"),
        **_hits(metrics),
        "verify_ms": _mean(metrics, "verify_ms"),
        "tree_step_ms": metrics[-1].draft_step_ms,
        "wait_ms": _mean(metrics, "draft_wait_ms"),
        "overhead_ms": _mean(metrics, "round_overhead_ms"),
    }
    if plan := metrics[-1].plan:
        row["plan"] = plan
    if setting.speculation.mode != "auto" and all(m.verify_ms for m in metrics):  # no theory of mixed modes
        row["measured_over_predicted"] = statistics.median(m.tokens_per_second / predicted(m) for m in metrics)
    reference = plain(settings)
    if reference is not None:
        row |= _compared(setting, answers, _answers(runs[reference.name]), temperature)
    return row


def _hits(metrics: Sequence[Metrics]) -> Row:
    hits, misses = ([m for m in metrics if getattr(m, field)] for field in ("hits", "misses"))
    if not hits and not misses:
        return {}
    return {
        "on_hit": _mean(hits, "mean_acceptance_length_on_hit") if hits else None,
        "on_miss": _mean(misses, "mean_acceptance_length_on_miss") if misses else None,
        "hit_rate": sum(m.hits for m in metrics) / sum(m.hits + m.misses for m in metrics),
    }


def _others(setting: Setting, settings: Sequence[Setting], runs: Runs) -> dict[str, str]:
    """Return the settings to divide by, by column: `ar`, `sd` of the same K; for `auto` the fastest fixed."""
    found = {}
    for other in settings:
        mode, lookahead = other.speculation.mode, other.speculation.num_speculative_tokens
        drafts = setting.speculation.mode in (*DRAFTED, "auto")
        if mode == "ar" or (mode == "sd" and drafts and setting.speculation.num_speculative_tokens == lookahead):
            found[f"over_{mode}"] = other.name
    fixed = [other.name for other in settings if other.speculation.mode != "auto"]
    if setting.speculation.mode == "auto" and fixed:
        found["over_best"] = max(fixed, key=lambda name: statistics.median(turn.tok_s for turn in runs[name]))
    return found


def plain(settings: Sequence[Setting]) -> Setting | None:
    """Return the setting whose ids the others must have: the first `ar`."""
    return next((setting for setting in settings if setting.speculation.mode == "ar"), None)


def _compared(
    setting: Setting, answers: Sequence[Completion], reference: Sequence[Completion], temperature: float
) -> Row:
    if setting.speculation.mode != "ar" and not setting.speculation.rule(temperature).emits_samples:
        return {"answers": len(answers), "equal_to_ar": None}
    pairs = zip(answers, reference, strict=True)
    return {"answers": len(answers), "equal_to_ar": sum(a.token_ids == b.token_ids for a, b in pairs)}


def differing(found: Sequence[Row]) -> list[str]:
    return [
        f"{row['mode']} at T = {row['temperature']:g}: {row['answers'] - row['equal_to_ar']} of {row['answers']} "
        "answers have other ids than ar"
        for row in found
        if row.get("equal_to_ar") is not None and row["equal_to_ar"] != row["answers"]
    ]


def predicted(m: Metrics) -> float:
    """Return the tokens per second that theory gives for the measured parts of a round.

    `ssd`: Theorem 7 of arXiv 2603.03251; `sd` and `ngram`: E / (1 + T)."""
    per_second = 1e3 / m.verify_ms
    if m.mode == "ar":
        return per_second
    wait = m.draft_wait_ms / m.verify_ms
    if not m.hits:  # one mode for all rounds, or only misses
        return per_second * speedup_sd(m.mean_acceptance_length, wait)
    # Filling the cache overlaps with the verification; only misses wait, and the mean wait is over all rounds.
    on_miss = wait / max(1e-9, 1 - m.hit_rate)
    return per_second * speedup_ssd(
        m.hit_rate, m.mean_acceptance_length_on_hit, m.mean_acceptance_length_on_miss, 0.0, on_miss
    )


def quartiles(values: Sequence[float]) -> list[float]:
    if len(values) == 1:
        return [values[0], values[0]]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return [first, third]


def bounded(gain: float, length: float) -> str:
    """Return a gain over `ar` in words: at most the acceptance length, the tokens of a round."""
    return f"at most {length:.2f}" if is_noise(gain, length) else f"{gain:.2f}"


def is_noise(gain: float, length: float) -> bool:
    return gain > length


def _answers(turns: Sequence[BenchTurn]) -> list[Completion]:
    return [completion for turn in turns for completion in turn.completions]


def _ratio(turns: Sequence[BenchTurn], others: Sequence[BenchTurn]) -> float | None:
    pairs = zip(turns, others, strict=True)
    ratios = [a.tok_s / b.tok_s for a, b in pairs if a.tok_s and b.tok_s]
    return statistics.median(ratios) if ratios else None


def _mean(metrics: Sequence[Metrics], field: str) -> float:
    return statistics.fmean(getattr(m, field) for m in metrics)
