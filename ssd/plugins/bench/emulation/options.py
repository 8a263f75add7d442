"""Options of emulation for `ssd bench`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click
import msgspec

from ssd.cli.option_types import Real
from ssd.config.emulation import DeviceTimes, ForwardTime
from ssd.errors import UsageError
from ssd.plugins.bench import datasets
from ssd.plugins.bench.emulation.agreement import PRESETS, Preset, stated_agreement
from ssd.plugins.bench.emulation.quantities import Times
from ssd.plugins.bench.options import BenchOptions
from ssd.plugins.bench.setup import Setup


class Emulated(click.ParamType):
    """Times such as "verify=15ms+60us,depth=2.2ms" as `DeviceTimes`, or "llama" as `Preset`."""

    name = "PRESET|verify=TIME[+EACH],depth=TIME[+EACH]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> DeviceTimes | Preset:
        if isinstance(value, (DeviceTimes, Preset)):
            return value
        if value in PRESETS:
            return PRESETS[value]
        known = DeviceTimes.__struct_fields__
        given: dict[str, ForwardTime] = {}
        for part in value.split(","):
            name, equals, text = (piece.strip() for piece in part.partition("="))
            if not equals:
                self.fail(f"{part!r} is neither a preset ({', '.join(PRESETS)}) nor NAME=TIME", param, ctx)
            if name not in known or name in given:
                what = "given twice" if name in given else f"none of {', '.join(known)}"
                self.fail(f"{name!r} is {what}", param, ctx)
            given[name] = ForwardTime(*Times().convert(text, param, ctx))
        if missing := [name for name in known if name not in given]:
            self.fail(f"{value!r} lacks the time of {missing[0]}", param, ctx)
        try:
            return msgspec.convert(msgspec.to_builtins(given), DeviceTimes)
        except msgspec.ValidationError as error:
            self.fail(f"{value!r}: {error}", param, ctx)


def _take_devices(ctx: click.Context, param: click.Parameter, value: DeviceTimes | Preset | None) -> Any:
    if isinstance(value, Preset):
        _set_defaults(
            ctx,
            num_speculative_tokens=[str(value.lookahead)],
            fan_out=[str(value.fan_out)],
            dataset=datasets.RANDOM,
        )
    return value


def _set_defaults(ctx: click.Context, **defaults: Any) -> None:
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def _take_length(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None:
        _set_defaults(ctx, dataset=datasets.RANDOM)  # a scripted pair reads no texts
    return value


_OPTIONS = [
    click.option(
        "--emulate",
        "devices",
        type=Emulated(),
        is_eager=True,
        callback=_take_devices,
        help=f"Let forwards take these times; {' or '.join(PRESETS)}: those, K, fan-out, and a synthetic pair as right "
        "as the paper's.",
    ),
    click.option(
        "--synthetic-acceptance-length",
        "length",
        type=Real(1),
        is_eager=True,
        callback=_take_length,
        help="With --emulate or --load-format dummy: models that agree so that a round of sd takes so many tokens, by "
        "the first -k.",
    ),
    click.option(
        "--synthetic-hit-rate",
        "hit_rate",
        type=Real(0, 1),
        help="Share of rounds that ssd prepares for, by the first -k and -f. Default: as the paper's Llama pair.",
    ),
]


def emulation_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the arguments of `setup_of` to a command with `BenchOptions`."""
    return functools.reduce(lambda decorated, option: option(decorated), reversed(_OPTIONS), function)


def setup_of(
    asked: BenchOptions, devices: DeviceTimes | Preset | None, length: float | None, hit_rate: float | None
) -> Setup:
    """Return the setup that the options ask for; raise UsageError for options that contradict."""
    lookahead, fan_out = next(iter(asked.num_speculative_tokens), 0), next(iter(asked.fan_out), ())
    agreement = stated_agreement(length, hit_rate, lookahead, fan_out)
    times = devices.times if isinstance(devices, Preset) else devices
    if agreement is None and isinstance(devices, Preset):
        if len(asked.temperature) != 1:
            raise UsageError(f"--emulate {devices.name} needs one temperature, on which its acceptance depends")
        agreement = devices.agreement(asked.temperature[0])
    if agreement is not None and asked.dataset != datasets.RANDOM:
        raise UsageError(f"a scripted pair reads no texts: --dataset {datasets.RANDOM}, not {asked.dataset}")
    return Setup(times, agreement)
