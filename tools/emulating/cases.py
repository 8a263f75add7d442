"""What is measured under emulation: pairs and their settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ssd.bench.emulated import Emulation
from ssd.bench.settings import Setting, Sweep
from ssd.emulation.agreement import Stated
from ssd.emulation.devices import DeviceTimes, Preset
from ssd.params import Mode, Speculation
from ssd.profile import Times

MODES: tuple[Mode, ...] = ("ar", "sd", "ssd")


@dataclass(frozen=True)
class Case:
    """A preset at a temperature, changed as `name` says: `paper` not at all."""

    preset: str
    name: str
    times: DeviceTimes
    stated: Stated
    temperature: float

    @property
    def emulation(self) -> Emulation:
        return Emulation(self.times, self.stated)

    def settings(self) -> list[Setting]:
        """Every mode once, named as it is."""
        values = (self.stated.lookahead,), ((self.stated.fan_out,),), ("jit",)
        return Sweep(MODES, *values).settings(Speculation())


def cases(preset: Preset, temperatures: tuple[float, ...]) -> Iterator[Case]:
    """The preset as it is; with misses in (nearly) every batch; with a draft that cannot fill a tree in time."""
    for temperature in temperatures:
        paper = Case(preset.name, "paper", preset.times, preset.stated(temperature), temperature)
        yield paper
        yield replace(paper, name="misses", stated=paper.stated._replace(acceptance=0.6, hit_rate=0.45, fan_out=1))
        slow = Times(preset.times.verify.fixed_s / 3)
        yield replace(paper, name="slow draft", times=DeviceTimes(preset.times.verify, slow))
