"""What is measured under emulation: pairs, settings, and the prompts of one turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from ssd.emulation.chains import VOCABULARY
from ssd.emulation.devices import DeviceTimes, Preset
from ssd.params import Mode, SamplingParams, Speculation
from ssd.profile import Times

MODES: tuple[Mode, ...] = ("ar", "sd", "ssd")
_PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Case:
    """A preset at a temperature, changed as `name` says: `paper` not at all."""

    preset: str
    name: str
    times: DeviceTimes
    lookahead: int
    fan_out: int
    temperature: float
    acceptance: float

    def speculation(self, mode: Mode) -> Speculation:
        return Speculation(mode, self.lookahead, (self.fan_out,), "jit")

    def params(self, mode: Mode, turn: int, tokens: int, batch: int) -> list[SamplingParams]:
        """For every prompt of a turn: the same in all modes."""
        return [
            SamplingParams(
                temperature=self.temperature,
                seed=turn * batch + row,
                max_tokens=tokens,
                ignore_eos=True,
                speculation=self.speculation(mode),
            )
            for row in range(batch)
        ]


def cases(name: str, preset: Preset, temperatures: tuple[float, ...]) -> Iterator[Case]:
    """The preset as it is; with misses in (nearly) every batch; with a draft that cannot fill a tree in time."""
    for temperature in temperatures:
        paper = Case(
            name, "paper", preset.times, preset.lookahead, preset.fan_out, temperature, preset.acceptance[temperature]
        )
        yield paper
        yield replace(paper, name="misses", fan_out=1, acceptance=0.6)
        slow = Times(preset.times.verify.fixed_s / 3)
        yield replace(paper, name="slow draft", times=DeviceTimes(preset.times.verify, slow))


def prompts(turn: int, batch: int) -> list[list[int]]:
    """Token ids that no other turn has."""
    random = Random(turn)
    return [random.choices(range(VOCABULARY), k=_PROMPT_TOKENS) for _ in range(batch)]
