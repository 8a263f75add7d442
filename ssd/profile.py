"""The profile of a target and its draft: one JSON document of what was measured, for `ssd plan` (docs/planning.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ssd.errors import UsageError
from ssd.files import read_bounded
from ssd.speculation.planning import Pair
from ssd.speculation.tuner import Line

Seconds = Annotated[float, Meta(ge=0, le=1e4)]
Rate = Annotated[float, Meta(ge=0, le=1)]
Text = Annotated[str, Meta(max_length=512)]
_MOST_BYTES = 2**20


class Times(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a forward by its size: `fixed_s` + `each_s` x tokens (of the target) or chains (of the draft)."""

    fixed_s: Seconds
    each_s: Seconds = 0.0

    @classmethod
    def of(cls, line: Line) -> Times:
        return cls(line.fixed, line.each)

    @property
    def line(self) -> Line:
        return Line(self.fixed_s, self.each_s)


class Misses(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """1 - hit rate = c F^-r by fan-out F (arXiv 2603.03251; ALGORITHM 1)."""

    c: Annotated[float, Meta(ge=0, le=1e3)]
    r: Annotated[float, Meta(ge=0, le=10)]


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `ssd.speculation.planning.Pair` holds, as a file does. `assumed` names the figures that were not measured,
    each with the default that was taken for it; `source` says what was measured, with what, where."""

    version: Literal[1] = 1
    name: Text
    verify: Times
    step: Times
    acceptance: Annotated[tuple[Rate, ...], Meta(min_length=1, max_length=64)]
    misses: Misses
    overhead_s: Seconds = 0.0
    target_gpus: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    draft_gpus: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    assumed: Annotated[dict[Text, Text], Meta(max_length=16)] = {}
    source: Annotated[dict[Text, Text], Meta(max_length=64)] = {}

    def __post_init__(self) -> None:
        if self.verify.fixed_s + self.verify.each_s <= 0:
            raise ValueError("verify: a verification takes more than no time")
        unknown = self.assumed.keys() - FIGURES
        if unknown:
            raise ValueError(f"assumed: there is no figure {sorted(unknown)[0]!r}; there are {', '.join(FIGURES)}")

    def pair(self) -> Pair:
        return Pair(
            verify=self.verify.line,
            step=self.step.line,
            acceptance=self.acceptance,
            misses=(self.misses.c, self.misses.r),
            overhead=self.overhead_s,
            target_gpus=self.target_gpus,
            draft_gpus=self.draft_gpus,
        )


FIGURES = ("verify", "step", "overhead_s", "acceptance", "misses", "target_gpus", "draft_gpus")
"""The fields that are numbers about the pair."""

PAPER = Profile(
    name="the paper's Llama pair",
    verify=Times(18.2e-3, 64e-6),
    step=Times(2.04e-3, 4.5e-6),
    acceptance=(0.86, 0.88, 0.90, 0.91, 0.92, 0.92, 0.93),
    misses=Misses(0.23, 0.6),
    overhead_s=1e-3,
    target_gpus=4.0,
    draft_gpus=1.0,
    source={
        "models": "Llama-3.1-70B on 4 H100, Llama-3.2-1B on a fifth, greedy (arXiv 2603.03251)",
        "fit": "python tools/simulate.py paper, rounded (docs/simulation.md)",
    },
)
"""What is taken where nothing is given: fitted to the paper's tables, not measured here."""


def checked(profile: Profile | None = None, **changes: Any) -> Profile:
    """`profile` with other fields, or one of fields alone, once types and bounds are checked, which a plain constructor
    does not do. Raises UsageError."""
    fields = {} if profile is None else msgspec.to_builtins(profile)
    try:
        return msgspec.convert(fields | msgspec.to_builtins(changes), Profile)
    except msgspec.ValidationError as error:
        raise UsageError(f"profile: {error}") from None


def read(file: Path) -> Profile:
    """Raises UsageError, naming the file and what is wrong with it."""
    content = read_bounded(file, _MOST_BYTES, pipe=True)
    try:
        return msgspec.json.decode(content, type=Profile)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} is no profile: {error}") from None


def write(profile: Profile, file: Path) -> None:
    """Raises UsageError where the profile is out of bounds or the file cannot be written."""
    text = msgspec.json.format(msgspec.json.encode(checked(profile)), indent=1)
    try:
        file.write_bytes(text + b"\n")
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from None
