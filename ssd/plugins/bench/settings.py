"""Names the settings that a benchmark compares, and fits an engine to them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from msgspec.structs import replace

from ssd.config.params import (
    DRAFTED,
    Allocation,
    FanOutChoice,
    Mode,
    SamplingDefaults,
    SamplingParams,
    Speculation,
    fan_out_fields,
)
from ssd.errors import RequestError, UsageError
from ssd.launch.options import EngineOptions
from ssd.speculation import backups as speculators

ROWS: tuple[Mode, ...] = ("ar", "ngram", "sd", "ssd", "auto")
"""The modes that are compared if none are named: the reference first, then the candidates of `auto`, then `auto`."""


class Setting(NamedTuple):
    name: str
    speculation: Speculation


class Sweep(NamedTuple):
    """Modes, and the values to run `sd` and `ssd` with; without values the engine's own are used."""

    modes: tuple[Mode, ...]
    lookaheads: tuple[int, ...] = ()
    fan_outs: tuple[FanOutChoice, ...] = ()
    backups: tuple[str, ...] = ()

    def settings(self, base: Speculation) -> list[Setting]:
        """Return every mode with every value that it uses; a value is in the name if there are several.

        Raises UsageError for an unused value, or values that do not fit together."""
        self._check()
        lookaheads = self.lookaheads or (base.num_speculative_tokens,)
        whole = product(lookaheads, self.fan_outs or (base.fan_out_choice,), self.backups or (base.backup,))
        found = []
        for mode in dict.fromkeys(self.modes):
            if mode == "ar":
                found.append(Setting("ar", Speculation("ar")))
            elif mode == "sd":
                found += [self._setting(base, "sd", lookahead, (), base.backup) for lookahead in lookaheads]
            elif mode == "ssd":
                found += [self._setting(base, "ssd", *values) for values in whole]
            else:
                found.append(Setting(mode, replace(base, mode=mode)))
        return found

    def _check(self) -> None:
        for flag, values, modes in (
            ("-k", self.lookaheads, {"sd", "ssd"}),
            ("--fan-out", self.fan_outs, {"ssd"}),
            ("--backup", self.backups, {"ssd"}),
        ):
            if len(values) > 1 and not modes & set(self.modes):
                raise UsageError(f"{flag} has several values, and none of the modes {', '.join(self.modes)} uses them")
        unknown = set(self.backups) - set(speculators.names())
        if unknown:
            raise UsageError(f"no backup {min(unknown)!r}; there are {', '.join(speculators.names())}")

    def _setting(self, base: Speculation, mode: Mode, lookahead: int, fan_out: FanOutChoice, backup: str) -> Setting:
        parts: list[str] = [mode]
        if len(self.lookaheads) > 1:
            parts.append(f"K={lookahead or 'auto'}")
        if mode == "ssd" and len(self.fan_outs) > 1:
            parts.append(f"F={fan_out_text(fan_out)}")
        if mode == "ssd" and len(self.backups) > 1:
            parts.append(backup)
        asked = fan_out_fields(fan_out)
        speculation = replace(base, mode=mode, num_speculative_tokens=lookahead, backup=backup, **asked)
        try:
            speculation.check()
        except RequestError as error:
            raise UsageError(f"{' '.join(parts)}: {error}") from None
        return Setting(" ".join(parts), speculation)


def fan_out_text(fan_out: FanOutChoice) -> str:
    return fan_out if isinstance(fan_out, str) else ",".join(map(str, fan_out)) or "auto"


def widest(settings: Sequence[Setting], base: Speculation) -> Speculation:
    """Return the speculation that an engine must start with to have room for all settings."""
    modes = {setting.speculation.mode for setting in settings}
    speculating = [each.speculation for each in settings if each.speculation.mode in (*DRAFTED, "auto")]
    if not speculating:
        return Speculation("ngram" if "ngram" in modes else "ar")
    longest = max(speculation.longest for speculation in speculating)
    chains = max(base.budget, *(speculation.chains for speculation in speculating))
    lookahead = 0 if longest == replace(base, num_speculative_tokens=0).longest else longest
    mode: Mode = "auto" if "auto" in modes else "ssd"
    return replace(base, mode=mode, num_speculative_tokens=lookahead, fan_out=(), budget=chains)


def default_modes(engine: EngineOptions, has_draft: bool = False) -> tuple[Mode, ...]:
    """Return the modes that are compared by default; those with a draft only if there is one."""
    return ROWS if engine.drafts or has_draft else tuple(mode for mode in ROWS if mode not in DRAFTED)


def base_speculation(engine: EngineOptions, allocation: Allocation = "joint") -> Speculation:
    return Speculation(sampler=engine.sampler, saguaro_c=engine.saguaro_c, budget=engine.budget, allocation=allocation)


def sized(engine: EngineOptions, settings: Sequence[Setting]) -> EngineOptions:
    """Return options with room for all settings; raise UsageError if they need a draft and none is given."""
    room = widest(settings, base_speculation(engine))
    drafting = [setting.name for setting in settings if setting.speculation.mode in DRAFTED]
    if drafting and not engine.drafts:
        raise UsageError(f"{drafting[0]} needs a draft for target {engine.target}: give --draft, or --modes ar,ngram")
    if room.mode in ("ar", "ngram"):
        return replace(engine, mode=room.mode)
    names = ("mode", "num_speculative_tokens", "fan_out", "backup", "budget")
    return replace(engine, **{name: getattr(room, name) for name in names})


class Protocol(NamedTuple):
    """The parameters of every request: `tokens` new tokens, in `chat` format or raw."""

    tokens: int
    chat: bool
    ignore_eos: bool = True
    seed: int = 0
    sampling: SamplingDefaults = SamplingDefaults()

    def params(self, setting: Setting, temperature: float, index: int) -> SamplingParams:
        """Return the parameters of prompt `index`, with one seed in all settings; no turn may help another."""
        return self.sampling.params(
            temperature=temperature,
            seed=self.seed + index,
            max_tokens=self.tokens,
            ignore_eos=self.ignore_eos,
            speculation=setting.speculation,
            store=False,
        )
