"""Tells which kernel replaces which torch function on which device, how to launch it, and which is compiled late."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache, cached_property, update_wrapper
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from ssd.law import DRAWN

log = logging.getLogger("ssd.kernels")

Given = ParamSpec("Given")
Result = TypeVar("Result")

KERNELS = {
    "adjust": "triton_adjustment",
    "begin_draft": "triton_rounds",
    "build": "triton_rounds",
    "decide": "triton_rounds",
    "drawn": "triton_sampling",
    "go_on_drafting": "triton_rounds",
    "gumbels_of": "triton_sampling",
    "lowest": "triton_sampling",
    "note_outcomes": "triton_adjustment",
    "warmed": "triton_sampling",
}
"""Functions that are `fused`, and the module of `ssd.kernels` that has the kernel of the same name."""


class Draws(NamedTuple):
    """The tensors that draw a token after each of n rows, on a device.

    `keys` int32 [n, 2] are the noise's. `laws` float32 [numbers, n] are in the order of `ssd.law.DRAWN`. `filtered`:
    some law may filter."""

    keys: Tensor
    laws: Tensor
    filtered: bool = False

    @property
    def inverse(self) -> Tensor:
        """Return 1 / temperature, float32 [n], 0 for a greedy row."""
        return self.laws[DRAWN.index("temperature")].contiguous()


@cache
def fuses(device: torch.device) -> bool:
    return device.type != "cpu" and find_spec("triton") is not None


class fused(Generic[Given, Result]):
    """Decorates a torch function: where `serves` says so, its kernel in `KERNELS` runs instead.

    Kernel and `reference` have the same result but for the last bits of floating-point noise."""

    def __init__(self, reference: Callable[Concatenate[Tensor, Given], Result]) -> None:
        self.reference, self.serves = reference, fuses
        update_wrapper(self, reference)

    def __call__(self, x: Tensor, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        return (self.kernel if self.serves(x.device) else self.reference)(x, *args, **kwargs)

    @cached_property
    def kernel(self) -> Callable[Concatenate[Tensor, Given], Result]:
        name = self.reference.__name__
        return cast(Callable[..., Result], getattr(import_module(f"ssd.kernels.{KERNELS[name]}"), name))


def launch_options(device: torch.device) -> dict[str, bool]:
    """Return options for a kernel with `PDL`: if `SSD_PDL=1`, it starts before the last one ends."""
    asked = os.environ.get("SSD_PDL") == "1" and device.type == "cuda"
    return {"PDL": True, "launch_pdl": True} if asked and torch.cuda.get_device_capability(device) >= (9, 0) else {}


def watch_compiles(device: torch.device, note: Callable[[], object] = int) -> None:
    """From now on log each kernel that Triton compiles, or loads from its cache, and call `note`."""
    if not fuses(device):
        return
    from triton import knobs

    def compiled(*, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        note()
        verb = "loaded" if cache_hit else "compiled"
        log.warning("Triton %s %s after the start, in %.2f s", verb, src.name, times.total / 1e6)

    knobs.compilation.listener = compiled


@cache
def processors_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
