"""The settings of emulation."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

Seconds = Annotated[float, Meta(ge=0, le=1e4)]


class ForwardTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a forward: `fixed_s` + `each_s` x tokens (target) or chains (draft)."""

    fixed_s: Seconds
    each_s: Seconds = 0.0


class DeviceTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The times of an emulated device: `verify` by the tokens of a batch, a tree step `depth` by its rows."""

    verify: ForwardTime
    depth: ForwardTime


class StatedAgreement(NamedTuple):
    """The agreement that a synthetic draft shall have with its target.

    The target accepts a draft token with probability `acceptance`. With K = `lookahead` and `fan_out` guesses for every
    accepted length, a share `hit_rate` of the rounds hits."""

    acceptance: float
    hit_rate: float
    lookahead: int
    fan_out: int
