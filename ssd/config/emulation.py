"""Settings of emulation: the times of a device, and how often a synthetic target and draft agree. Plain values."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

Seconds = Annotated[float, Meta(ge=0, le=1e4)]


class ForwardTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a forward by its size: `fixed_s` + `each_s` x tokens (of the target) or chains (of the draft)."""

    fixed_s: Seconds
    each_s: Seconds = 0.0


class DeviceTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The times of forwards on an emulated device.

    `verify` is the target's, by the tokens of the whole batch, prompts included. `depth` is the draft's, by the rows of
    the whole batch; it makes every chain one token longer."""

    verify: ForwardTime
    depth: ForwardTime


class Agreement(NamedTuple):
    """The agreement that a synthetic draft shall have with its target.

    The target accepts a draft token with probability `acceptance`. With K = `lookahead` draft tokens a round and
    `fan_out` guesses for every accepted length, a share `hit_rate` of the rounds hits the speculation cache."""

    acceptance: float
    hit_rate: float
    lookahead: int
    fan_out: int
