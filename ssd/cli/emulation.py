"""What commands accept as emulated devices and synthetic pairs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
import msgspec

from ssd.bench.datasets import RANDOM
from ssd.bench.emulated import Emulation
from ssd.cli.quantities import Real, Times
from ssd.emulation.agreement import stated
from ssd.emulation.devices import PRESETS, DeviceTimes, Preset
from ssd.errors import UsageError
from ssd.profile import Times as Seconds

if TYPE_CHECKING:
    from ssd.cli.bench_options import Asked


class Emulated(click.ParamType):
    """ "verify=15ms,depth=2.2ms" as `DeviceTimes`, or the name of a pair of the paper ("llama") as `Preset`. A time may
    have a part for each token or chain: "verify=15ms+60us"."""

    name = "PRESET|verify=TIME[+EACH],depth=TIME[+EACH]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> DeviceTimes | Preset:
        if isinstance(value, (DeviceTimes, Preset)):
            return value
        if value in PRESETS:
            return PRESETS[value]
        known = DeviceTimes.__struct_fields__
        given: dict[str, Seconds] = {}
        for part in value.split(","):
            name, equals, text = (piece.strip() for piece in part.partition("="))
            if not equals:
                self.fail(f"{part!r} is neither a preset ({', '.join(PRESETS)}) nor NAME=TIME", param, ctx)
            if name not in known or name in given:
                what = "given twice" if name in given else f"none of {', '.join(known)}"
                self.fail(f"{name!r} is {what}", param, ctx)
            given[name] = Seconds.of(Times().convert(text, param, ctx))
        if missing := [name for name in known if name not in given]:
            self.fail(f"{value!r} lacks the time of {missing[0]}", param, ctx)
        try:
            return msgspec.convert(msgspec.to_builtins(given), DeviceTimes)
        except msgspec.ValidationError as error:
            self.fail(f"{value!r}: {error}", param, ctx)


def _take_preset(ctx: click.Context, param: click.Parameter, value: DeviceTimes | Preset | None) -> Any:
    """Its K and fan-out are defaults."""
    if isinstance(value, Preset):
        _prefer(ctx, lookaheads=[str(value.lookahead)], fan_outs=[str(value.fan_out)], dataset=RANDOM)
    return value


def _take_length(ctx: click.Context, param: click.Parameter, value: float | None) -> float | None:
    if value is not None:
        _prefer(ctx, dataset=RANDOM)  # a scripted pair reads no texts
    return value


def _prefer(ctx: click.Context, **defaults: Any) -> None:
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


_OPTIONS = [
    click.option(
        "--emulate",
        "devices",
        type=Emulated(),
        is_eager=True,
        callback=_take_preset,
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
    """Add what is emulated to a command that has the options of `Asked`; it gets an `Emulation`, or None, as
    `emulation`."""

    @functools.wraps(function)
    def call(
        asked: Asked,
        devices: DeviceTimes | Preset | None,
        length: float | None,
        hit_rate: float | None,
        **values: Any,
    ) -> Any:
        return function(asked=asked, emulation=emulation(asked, devices, length, hit_rate), **values)

    return functools.reduce(lambda decorated, option: option(decorated), reversed(_OPTIONS), call)


def emulation(
    asked: Asked, devices: DeviceTimes | Preset | None, length: float | None, hit_rate: float | None
) -> Emulation | None:
    """Without devices the models' own forwards are measured. Raises UsageError for what does not go together."""
    if length is None and hit_rate is not None:
        raise UsageError("--synthetic-hit-rate needs --synthetic-acceptance-length")
    if devices is None and length is None:
        return None
    times = devices.times if isinstance(devices, Preset) else devices
    if length is not None:
        agreement = stated(length, hit_rate, *_lengths(asked))
    elif isinstance(devices, Preset):
        if len(asked.temperatures) != 1:
            raise UsageError(f"--emulate {devices.name} needs one temperature, on which its acceptance depends")
        agreement = devices.stated(asked.temperatures[0])
    else:
        return Emulation(times, None)
    if asked.dataset != RANDOM:
        raise UsageError(f"a scripted pair reads no texts: --dataset {RANDOM}, not {asked.dataset}")
    return Emulation(times, agreement)


def _lengths(asked: Asked) -> tuple[int, int]:
    """K and F that an acceptance length and a hit rate are of. Raises UsageError."""
    lookahead, fan_out = next(iter(asked.lookaheads), 0), next(iter(asked.fan_outs), ())
    if not lookahead or len(fan_out) != 1:
        raise UsageError("--synthetic-acceptance-length needs -k and -f, a number each, which it is stated for")
    return lookahead, fan_out[0]
