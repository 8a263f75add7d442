"""Leaves out what depends on numbers that no stand-in has: kernels do nothing. STANDIN_CHECKS=1: it stays.

A .pth file of the stand-in's Python imports this when the interpreter starts."""

import os
import sys
from collections.abc import Callable
from functools import reduce
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def _passed(*_, **__):  # type: ignore[no-untyped-def]
    """Check nothing."""


def _sampled(ids, vocab_size, refuse=False):  # type: ignore[no-untyped-def]
    """Return ids of the vocabulary, whatever lay in memory."""
    return (ids.cpu() % vocab_size).tolist()


def _mixed(self, x, shares, chosen):  # type: ignore[no-untyped-def]
    """Run the first expert in place of the chosen ones."""
    return self._experts[0](x) * shares[:, :1].to(x.dtype)


_CHECKS = {
    "ssd.models.families.qwen3_moe": ("Experts.mixed", _mixed),
    "ssd.models.stored": ("check_finite", _passed),
    "ssd.models.head": ("check_ids", _passed),
    "ssd.speculation.sampling": ("read_ids", _sampled),
}


class _Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name not in _CHECKS:
            return None
        spec = super().find_spec(name, path, target)
        return spec and _without(spec, *_CHECKS[name])


def _without(spec: ModuleSpec, check: str, other: Callable[..., object]) -> ModuleSpec:
    assert spec.loader is not None
    execute = spec.loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        *owners, name = check.split(".")
        setattr(reduce(getattr, owners, module), name, other)

    spec.loader.exec_module = exec_module  # type: ignore[method-assign]
    return spec


if "FAKECUDA_LOG" in os.environ and not os.environ.get("STANDIN_CHECKS"):
    sys.meta_path.insert(0, _Finder)
