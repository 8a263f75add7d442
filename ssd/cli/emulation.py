"""What commands accept as emulated devices."""

from __future__ import annotations

from typing import Any

import click

from ssd.cli.quantities import Times, written
from ssd.emulation.devices import PRESETS, DeviceTimes
from ssd.profile import Times as Seconds


class Emulated(click.ParamType):
    """ "verify=15ms,depth=2.2ms", or the name of a pair of the paper ("llama"), as `DeviceTimes`. A time may have a
    part for each token or chain: "verify=15ms+60us"."""

    name = "PRESET|verify=TIME[+EACH],depth=TIME[+EACH]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> DeviceTimes:
        if isinstance(value, DeviceTimes):
            return value
        if value in PRESETS:
            return PRESETS[value].times
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
        return DeviceTimes(**given)


def emulated(times: DeviceTimes) -> str:
    """For people, and as the option takes it: "verify=15ms,depth=1.8ms"."""
    return f"verify={written(times.verify.line)},depth={written(times.depth.line)}"
