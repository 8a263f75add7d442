"""The profile of a target and its draft: measured figures in one JSON document, for `ssd plan` (docs/planning.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ssd.config.emulation import ForwardTime, Seconds
from ssd.errors import UsageError
from ssd.planning.grid import Pair
from ssd.speculation.theory import Cost
from ssd.system.files import read_bounded
from ssd.tuning.costs import CostTable

_Size = Annotated[int, Meta(ge=1, le=2**20)]
_Taken = Annotated[float, Meta(gt=0, le=3600)]
Points = Annotated[tuple[tuple[_Size, _Taken], ...], Meta(min_length=1, max_length=512)]
"""Seconds of a forward at several sizes, as (size, seconds); times between them are interpolated."""
Rate = Annotated[float, Meta(ge=0, le=1)]
Text = Annotated[str, Meta(max_length=512)]
_MOST_BYTES = 2**20


class Misses(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The miss rate c F^-r by fan-out F (arXiv 2603.03251)."""

    c: Annotated[float, Meta(ge=0, le=1e3)]
    r: Annotated[float, Meta(ge=0, le=10)]


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A pair's figures as a file holds them (see `ssd.planning.grid.Pair`).

    Forwards are lines or points. `assumed` names the figures that were not measured, with the default taken for each.
    `source` says what was measured, with what, and where."""

    version: Literal[1] = 1
    name: Text
    verify: ForwardTime | Points
    step: ForwardTime | Points
    acceptance: Annotated[tuple[Rate, ...], Meta(min_length=1, max_length=64)]
    misses: Misses
    overhead_s: Seconds = 0.0
    target_gpus: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    draft_gpus: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    verify_alone: ForwardTime | Points | None = None
    step_alone: ForwardTime | Points | None = None
    assumed: Annotated[dict[Text, Text], Meta(max_length=16)] = {}
    source: Annotated[dict[Text, Text], Meta(max_length=64)] = {}

    def __post_init__(self) -> None:
        for figure in ("verify", "verify_alone"):
            times = getattr(self, figure)
            if isinstance(times, ForwardTime) and times.fixed_s + times.each_s <= 0:
                raise ValueError(f"{figure}: a verification takes more than no time")
        unknown = self.assumed.keys() - FIGURES
        if unknown:
            raise ValueError(f"assumed: there is no figure {sorted(unknown)[0]!r}; there are {', '.join(FIGURES)}")

    def pair(self) -> Pair:
        return Pair(
            verify=_cost(self.verify),
            step=_cost(self.step),
            acceptance=self.acceptance,
            misses=(self.misses.c, self.misses.r),
            overhead=self.overhead_s,
            target_gpus=self.target_gpus,
            draft_gpus=self.draft_gpus,
            verify_alone=None if self.verify_alone is None else _cost(self.verify_alone),
            step_alone=None if self.step_alone is None else _cost(self.step_alone),
        )


def _cost(times: ForwardTime | Points) -> Cost:
    return times.line if isinstance(times, ForwardTime) else CostTable(dict(times))


_TIMES = ("verify", "verify_alone", "step", "step_alone")
FIGURES = (*_TIMES, "overhead_s", "acceptance", "misses", "target_gpus", "draft_gpus")
"""The fields with numbers about the pair."""

PAPER = Profile(
    name="the paper's Llama pair",
    verify=ForwardTime(18.2e-3, 64e-6),
    step=ForwardTime(2.04e-3, 4.5e-6),
    acceptance=(0.86, 0.88, 0.90, 0.91, 0.92, 0.92, 0.93),
    misses=Misses(0.23, 0.6),
    overhead_s=1e-3,
    target_gpus=4.0,
    draft_gpus=1.0,
    source={
        "models": "Llama-3.1-70B on 4 H100, Llama-3.2-1B on a fifth, greedy (arXiv 2603.03251)",
        "fit": "python -m tools.simulate paper, rounded (docs/simulation.md)",
    },
)
"""The default: fitted to the paper's tables, not measured here."""


def checked(profile: Profile | None = None, **changes: Any) -> Profile:
    """Return `profile` with `changes`, or a profile of `changes` alone; raise UsageError if it is out of bounds."""
    fields = {} if profile is None else msgspec.to_builtins(profile)
    try:
        return msgspec.convert(fields | msgspec.to_builtins(changes), Profile)
    except msgspec.ValidationError as error:
        raise UsageError(f"profile: {error}") from None


def read(file: Path) -> Profile:
    """Read a profile; raise UsageError, which names the file and its fault."""
    content = read_bounded(file, _MOST_BYTES, pipe=True)
    try:
        return msgspec.json.decode(content, type=Profile)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is no profile: {error}") from None


def write(profile: Profile, file: Path) -> None:
    """Write a profile; raise UsageError if it is out of bounds or the file cannot be written."""
    text = msgspec.json.format(msgspec.json.encode(checked(profile)), indent=1)
    try:
        file.write_bytes(text + b"\n")
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from None
