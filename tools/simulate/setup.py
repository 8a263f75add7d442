"""What is simulated: frozen values, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from ssd.errors import UsageError
from ssd.speculation.theory import LinearCost
from tools.simulate.statistics import Source, Statistics

MODES = ("ar", "sd", "ssd")
ENGINES = ("reference", "anytime")
BACKUPS = ("auto", "neural", "cheap")
MAX_BATCH, MAX_DRAFTS = 64, 64


@dataclass(frozen=True)
class Devices:
    """The devices; times in seconds.

    `verify`: a forward of the target by the tokens of the whole batch. `step`: a forward of the draft by the chains on
    one device; `drafts` equal devices split the chains. `overhead`: what the target
    spends on a round with a draft beside its forward. `delay`: a message, one way. `rebuild`: forwards over K + 1 rows
    a sequence before each tree of the reference engine."""

    verify: LinearCost
    step: LinearCost
    drafts: int = 1
    overhead: float = 0.0
    delay: float = 0.0
    rebuild: int = 0

    def __post_init__(self) -> None:
        if min(self.verify) < 0 or sum(self.verify) <= 0:
            raise UsageError(
                f"a verification takes more than 0 seconds and neither part is negative, not {self.verify}"
            )
        if min(self.step) < 0 or sum(self.step) <= 0:
            raise UsageError(f"a draft step takes more than 0 seconds and neither part is negative, not {self.step}")
        if self.overhead < 0 or self.delay < 0 or self.rebuild < 0:
            raise UsageError("overhead, network delay and rebuilding cannot be negative")
        if not 1 <= self.drafts <= MAX_DRAFTS:
            raise UsageError(f"there are 1 to {MAX_DRAFTS} draft devices, not {self.drafts}")


@dataclass(frozen=True)
class Setup:
    """A run.

    `engine`: `reference` is strict ping-pong, in which a batch waits for its slowest row; `anytime` is this project's.
    `fan_out`: one number for all accepted lengths, or F_0..F_K, 0 for a length without a
    chain. `backup`, on a miss: `neural` waits for K fresh tokens, `cheap` takes what costs no time, `auto` (anytime
    only) waits as long as that pays."""

    devices: Devices
    statistics: Statistics
    mode: str = "ssd"
    engine: str = "reference"
    lookahead: int = 7
    fan_out: tuple[int, ...] = (3,)
    batch: int = 1
    backup: str = "neural"

    def __post_init__(self) -> None:
        for value, known in ((self.mode, MODES), (self.engine, ENGINES), (self.backup, BACKUPS)):
            if value not in known:
                raise UsageError(f"{value!r} is none of {', '.join(known)}")
        if self.lookahead < 1:
            raise UsageError(f"the lookahead K must be at least 1, not {self.lookahead}")
        if len(self.fan_out) not in (1, self.lookahead + 1) or min(self.fan_out) < 0:
            raise UsageError(
                f"a fan-out is one number or K + 1 = {self.lookahead + 1} of them, none negative, not {self.fan_out}"
            )
        if not any(self.fan_out):
            raise UsageError("a fan-out of zeros alone prepares nothing: give one length a chain, or take mode sd")
        if not 1 <= self.batch <= MAX_BATCH:
            raise UsageError(f"the batch must be 1 to {MAX_BATCH}, not {self.batch}")
        if self.backup == "auto" and self.engine == "reference" and self.mode == "ssd":
            raise UsageError("the reference engine has no backup 'auto': neural or cheap")

    @property
    def cheap_depth(self) -> int:
        """Return how many draft tokens the cheap backup proposes: none if they would never be accepted."""
        return self.lookahead if self.statistics.law(Source.CHEAP).rates[0] > 0 else 0
