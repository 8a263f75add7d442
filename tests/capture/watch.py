"""Watches a function on `meta` tensors as a CUDA graph would capture it: what is illegal, and what is launched.

`meta` tensors have shapes and no numbers. So a 70B model costs nothing, and code that looks at a number cannot hide."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from triton.runtime.interpreter import GridExecutor

ROOT = Path(__file__).parents[2]
META = torch.device("meta")

# The host waits for the device, or the shape of the result depends on numbers.
_WAITS = {"_local_scalar_dense", "item", "nonzero", "nonzero_static", "unique_dim", "_unique2", "unique_consecutive"}
_WAITS |= {"masked_select", "equal", "is_nonzero", "repeat_interleave", "_assert_async"}
_INDEXES = {"index", "index_put", "index_put_"}  # by masks too
_FROM_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, torch.from_numpy)
# Make a tensor, and launch nothing.
MADE = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_reshape_alias", "lift_fresh"}
# Kernels of an operation that has several (torch 2.11 on an H100, from its sources: radix sorts, two-pass scans).
_LAUNCHES = {"topk": 3, "sort": 4, "cumsum": 2, "argmax": 1, "index_put": 2, "index_put_": 2}
_PRODUCTS = {"linear", "mm", "addmm", "bmm"}
# Read and write as many numbers as they find or store, whatever lies in the table.
_LOOKS_UP = {"index", "index_select", "embedding", "gather", "index_copy_", "index_put_", "index_add_", "scatter"}


class Fault(AssertionError):
    """What no graph can hold, with the operation and the line of ours that asked for it."""


@dataclass
class Counts:
    """Kernels that a function launches, by name, and the bytes that they read and write."""

    work: list[tuple[str, int, int]] = field(default_factory=list)
    """Of each operation: its name, its launches, its bytes."""

    @property
    def launches(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for name, launches, _ in self.work:
            found[name] += launches
        return found

    @property
    def total(self) -> int:
        return self.launches.total()

    @property
    def bytes(self) -> int:
        return sum(size for *_, size in self.work)

    def milliseconds(self, launch_us: float, terabytes_per_s: float) -> float:
        """Each operation takes the time of its bytes, and as long as its launches take to begin and end."""
        return self.total * launch_us / 1e3 + self.bytes / terabytes_per_s / 1e9

    def floor(self, terabytes_per_s: float) -> float:
        """Milliseconds that the bytes of the products alone take: weights, mostly."""
        return sum(size for name, _, size in self.work if name in _PRODUCTS) / terabytes_per_s / 1e9


class _Watch(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, given = func.overloadpacket.__name__, tensors_of((args, kwargs))
        check_waits(func, given)
        host = [part for part in given if part.device != META]
        if host or (kwargs.get("device") is not None and torch.device(kwargs["device"]) != META):
            raise Fault(f"{func} touches the memory of the host{where()}")
        try:
            result = func(*args, **kwargs)
        except NotImplementedError as error:
            raise Fault(f"{func} depends on numbers{where()}: {error}") from None
        made = tensors_of(result)
        if any(part.device != META for part in made):
            raise Fault(f"{func} makes a tensor of the host{where()}")
        if name not in MADE and not _is_view(func, given, made):
            counted = [*given, *made]
            if name in _LOOKS_UP:
                counted = given[1:] if name.endswith("_") else made
            twice = 2 if name in _LOOKS_UP else 1
            self._counts.work.append((name, _LAUNCHES.get(name, 1), twice * sum(map(_bytes, counted))))
        return result


def check_waits(func: Any, given: list[Tensor]) -> None:
    """Raise `Fault` if an operation on tensors `given` waits for the device."""
    name = func.overloadpacket.__name__
    if name in _WAITS or (name in _INDEXES and any(_chooses(part) for part in given[1:])):
        raise Fault(f"{func} waits for numbers of the device{where()}")


class Listen(TorchFunctionMode):
    """Finds lists of numbers that become tensors: a copy from the host, which `meta` tensors do not need."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        index = args[1:2] if func in (Tensor.__getitem__, Tensor.__setitem__) else ()
        parts = index[0] if index and isinstance(index[0], tuple) else index
        if func in _FROM_NUMBERS or any(isinstance(part, list) for part in parts):
            raise Fault(f"{func.__name__} copies numbers from the host{where()}")
        return func(*args, **(kwargs or {}))


@contextmanager
def kernels_in(counts: Counts) -> Iterator[None]:
    """Count kernels of Triton instead of running them."""

    def launch(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        tensors = tensors_of((args, kwargs))
        if any(part.device != META for part in tensors):
            raise Fault(f"{executor.fn.__name__} touches the memory of the host{where()}")
        # Of a cache it reads what the text needs, which no shape says: not counted.
        counts.work.append((executor.fn.__name__, 1, 0))

    before, GridExecutor.__call__ = GridExecutor.__call__, launch
    try:
        yield
    finally:
        GridExecutor.__call__ = before


@contextmanager
def watched() -> Iterator[Counts]:
    """Count what is launched here. Raises `Fault` where something cannot be captured."""
    counts = Counts()
    with kernels_in(counts), Listen(), _Watch(counts), torch.inference_mode():
        yield counts


def count(function: Callable[[], object]) -> Counts:
    """What a function launches."""
    with watched() as counts:
        function()
    return counts


def tensors_of(of: Any) -> list[Tensor]:
    return [part for part in tree_flatten(of)[0] if isinstance(part, Tensor)]


def _chooses(index: Tensor) -> bool:
    """Whether an index is a mask, so that the result has as many rows as it has ones."""
    return index.dtype in (torch.bool, torch.uint8)


def _is_view(func: Any, given: Sequence[Tensor], made: Sequence[Tensor]) -> bool:
    """Return true if an operation only looks at memory that it was given. `to` does so where it changes nothing."""
    aliases = [returned.alias_info for returned in func._schema.returns]
    if not aliases or any(alias is None or alias.is_write for alias in aliases):
        return False
    there = {part.untyped_storage()._cdata for part in given}
    return all(part.untyped_storage()._cdata in there for part in made)


def _bytes(part: Tensor) -> int:
    """Of numbers that are there: a tensor that was expanded repeats some."""
    return part.element_size() * prod(size for size, step in zip(part.shape, part.stride(), strict=True) if step)


def where() -> str:
    """The innermost line of ours."""
    ours = [
        frame
        for frame in traceback.extract_stack()
        if frame.filename.startswith(str(ROOT)) and Path(frame.filename).name not in ("watch.py", "replay.py")
        if "site-packages" not in frame.filename  # an environment may lie in the checkout
    ]
    return f", {Path(ours[-1].filename).relative_to(ROOT)}:{ours[-1].lineno}: {ours[-1].line}" if ours else ""
