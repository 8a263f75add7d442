"""The profile of a pair, for `ssd plan`, out of runs one request at a time (docs/planning.md)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ssd import profile
from ssd.bench.figures import metrics_by_name
from ssd.bench.runs import Runs
from ssd.bench.settings import Setting
from ssd.errors import UsageError
from ssd.measured import profile_of
from ssd.params import Speculation

_FAN_OUTS = (1, 2, 4)


def fan_out_settings(settings: Sequence[Setting], base: Speculation) -> dict[int, Setting]:
    """The runs that the law of misses needs beside `settings`: `ssd` by guesses for every accepted length. Raises
    UsageError where `settings` cannot make a profile."""
    lookaheads = {s.speculation.num_speculative_tokens for s in settings if s.speculation.mode != "ar"}
    if not {"ar", "sd"} <= {setting.name for setting in settings} or 0 in lookaheads:
        raise UsageError("--write-profile needs the modes ar and sd, one K and one temperature: -k 4 --temperature 0")
    (lookahead,) = lookaheads  # with several, "sd" would not be the whole name
    plan = replace(base, mode="ssd", num_speculative_tokens=lookahead, backup="none")
    return {count: Setting(f"ssd F={count}", replace(plan, fan_out=(count,))) for count in _FAN_OUTS}


def write(file: Path, name: str, runs: Runs, by_fan_out: dict[int, Setting], facts: dict[str, Any]) -> None:
    """The profile of `runs`, with `facts` about them as its source. Raises UsageError."""
    metrics = metrics_by_name(runs)
    misses = {count: metrics[setting.name] for count, setting in by_fan_out.items()}
    source = {key: str(value) for key, value in facts.items()}
    profile.write(profile_of(name, metrics["ar"], metrics["sd"], misses, source), file)
