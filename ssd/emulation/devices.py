"""The pairs of models that the paper measured, for `--emulate`: forward times, K, fan-out, agreement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ssd.config.emulation import Agreement, DeviceTimes, ForwardTime
from ssd.errors import UsageError


class Preset(NamedTuple):
    """A pair of models as the paper ran it.

    `fan_out` is the same for all accepted lengths. `acceptance` is a draft token's acceptance rate by temperature,
    taken as equal at every position."""

    name: str
    models: str
    times: DeviceTimes
    lookahead: int
    fan_out: int
    acceptance: Mapping[float, float]
    hit_rate: float

    def agreement(self, temperature: float) -> Agreement:
        """Return the pair's agreement at a temperature. Raises UsageError if it is not known."""
        if temperature not in self.acceptance:
            known = ", ".join(f"{t:g}" for t in self.acceptance)
            raise UsageError(
                f"the preset {self.name} states no acceptance at temperature {temperature:g}, only at {known}"
            )
        return Agreement(self.acceptance[temperature], self.hit_rate, self.lookahead, self.fan_out)


_LLAMA = Preset(
    "llama",
    "Llama-3.1-70B on 4 H100, Llama-3.2-1B on a fifth",
    DeviceTimes(verify=ForwardTime(15.0e-3), depth=ForwardTime(1.8e-3)),
    lookahead=7,
    fan_out=3,
    acceptance={0.0: 0.888, 1.0: 0.771},
    hit_rate=0.85,
)
_QWEN = Preset(
    "qwen",
    "Qwen3-32B, Qwen3-0.6B",
    DeviceTimes(verify=ForwardTime(11.3e-3), depth=ForwardTime(1.8e-3)),
    lookahead=4,
    fan_out=2,
    acceptance={0.0: 0.73, 1.0: 0.53},
    hit_rate=0.75,
)
PRESETS = {preset.name: preset for preset in (_LLAMA, _QWEN)}
"""Presets by name, from the public figures of arXiv 2603.03251 and a public re-run of the authors' code at batch 1.

llama: from the re-run. A verification took 15.0 ms, and so did a token of `ar`. A depth took (19.4 - 15.0 - 2.9) /
(.12 x 7) ms: a round's time beyond verification and overhead, divided by the depths that misses waited for. `sd`, at
181.7 tok/s, confirms it: 1.75 ms. The tokens of a round, .88 x 5.68 + .12 x 4.01 with K = 7, give the acceptance at
T = 0. At T = 1 the paper's `sd` is .70 times as fast. The hit rate is the paper's at T = 0; with noise that target and
draft share it is equal at T = 1.
qwen: `ar` runs at 88.8 tok/s. The depth time of Llama's draft and the miss rate of a fan-out of 2 are assumed. `sd` at
136.8 tok/s with K = 4 and the re-run's overhead give the acceptance at T = 0. The acceptance at T = 1 is assumed to
fall as Llama's does. K and F are the authors' for this pair."""
