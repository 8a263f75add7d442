"""Stands in for CUDA graphs on a CPU: records the operations of one run and repeats them into the same memory.

`ssd.execution.graphs.once` calls a captured function again. A graph does not: it repeats launches. So on a GPU

- Python runs once, when the graph is captured: a replay sets no attribute and reads no Python number again;
- inputs are read, and results are written, where they lay at the capture;
- other graphs overwrite memory that nothing outside of the graph refers to. Here each replay leaves garbage in it.

Our C kernels take bare addresses and cannot be recorded: torch's operations run in their place. Kernels of Triton can,
by its interpreter. What no graph can hold raises `Fault`. So does a random generator, as no captured code of ours uses
one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from ssd.draft import static_shapes
from ssd.execution import static
from ssd.execution.tables import BatchTensors
from ssd.target import overlap
from tests.capture.watch import MADE, Fault, Listen, check_waits, where

# Values that Python, NumPy or a C kernel reads.
_TO_HOST = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.__dlpack__)
# Change more of a tensor than its numbers.
_RESHAPED = {"resize_", "resize_as_", "set_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_"}


class _Operation(NamedTuple):
    """`results` are those in memory of their own, by their place among all: a replay copies new ones into it."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[tuple[int, Tensor]]


class Recording:
    """The operations of a run. A call repeats them.

    Holds aliases of all tensors, not the tensors themselves. So it can tell what else refers to a result's memory."""

    def __init__(self) -> None:
        self._operations: list[_Operation] = []
        self._made: dict[int, Tensor] = {}
        self._aliases: Counter[int] = Counter()

    def add(self, run: Callable[..., Any], args: Any, kwargs: Any, results: Any = None) -> None:
        """Add what has run, with its results."""
        given, made = {_memory(tensor) for tensor in _tensors((*args, *kwargs.values()))}, []
        for place, result in enumerate(_tensors(results if isinstance(results, list | tuple) else (results,))):
            if _memory(result) not in given:
                made.append((place, self._alias(result)))
                self._made.setdefault(_memory(result), made[-1][1])
        changes = run is _launch or run._schema.is_mutable  # type: ignore[attr-defined]
        if changes or (made and run.overloadpacket.__name__ not in MADE):  # type: ignore[attr-defined]
            kwargs = {name: self._aliases_of(given) for name, given in kwargs.items()}
            self._operations.append(_Operation(run, self._aliases_of(args), kwargs, made))

    def _alias(self, tensor: Tensor) -> Tensor:
        if not _memory(tensor):
            return tensor
        self._aliases[_memory(tensor)] += 1
        return torch.ops.aten.alias.default(tensor)

    def _aliases_of(self, given: Any) -> Any:
        """The arguments of an operation, lists of tensors too, with aliases of their own."""
        if isinstance(given, Tensor):
            return self._alias(given)
        return type(given)(map(self._aliases_of, given)) if isinstance(given, list | tuple) else given

    @torch.inference_mode()
    def __call__(self) -> None:
        for run, args, kwargs, results in self._operations:
            found = run(*args, **kwargs)
            for place, memory in results:
                memory.copy_(found if isinstance(found, Tensor) else found[place])
        self.spoil()

    def spoil(self, everything: bool = False) -> None:
        """Leave garbage in results that only this recording refers to, or in all."""
        for memory, result in self._made.items():
            if everything or _references(memory) == self._aliases[memory]:
                result.fill_(_GARBAGE.get(result.dtype, torch.nan))


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_GARBAGE = {torch.bool: True} | {dtype: torch.iinfo(dtype).max // 2 for dtype in _INTEGERS}


def _memory(tensor: Tensor) -> int:
    """Where the memory of a tensor begins; 0 for weights in a layout of oneDNN's, which hides theirs."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0


def _references(memory: int) -> int:
    """How many tensors have this memory."""
    return torch._C._storage_Use_Count(memory) - 1  # the question holds one, too


def _tensors(given: Any) -> Iterator[Tensor]:
    """The tensors among the arguments of an operation, those in lists too."""
    for part in given:
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, list | tuple):
            yield from _tensors(part)


class _Recorder(TorchDispatchMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        check_waits(func, [*_tensors((*args, *kwargs.values()))])
        if torch.Tag.nondeterministic_seeded in func.tags or name in _RESHAPED:
            raise Fault(f"{func} cannot be recorded{where()}")
        results = func(*args, **kwargs)
        self._recording.add(func, args, kwargs, results)
        return results


class _Listen(Listen):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TO_HOST:
            raise Fault(f"{func.__name__} waits for numbers of the device{where()}")
        return super().__torch_function__(func, types, args, kwargs)


_run_kernel = GridExecutor.__call__


def _launch(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
    """Run a kernel of Triton, by operations that are its interpreter's own."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        _run_kernel(executor, *args, **kwargs)


@contextmanager
def _recorded() -> Iterator[Recording]:
    """Record what is launched here."""
    recording = Recording()

    def launch(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            recording.add(_launch, (executor, *args), kwargs)
        _launch(executor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, _Listen(), _Recorder(recording):
        patch.setattr(GridExecutor, "__call__", launch)
        yield recording


@torch.inference_mode()
def captured(function: Callable[[], None]) -> Callable[[], None]:
    """Stand in for `ssd.execution.graphs.GraphPool.capture`. The capture itself leaves only garbage in the results."""
    if isinstance(function, _Later):
        return function.capture()
    function()  # what it makes once, it has made before the capture
    with _recorded() as recording:
        function()
    recording.spoil(everything=True)
    return recording


class _Later:
    """Captures a function when it is first called, as few tests use all shapes.

    Its `batch` is filled with padding meanwhile, as at a warm-up."""

    def __init__(self, function: Callable[[], None], batch: BatchTensors, pad: Callable[[], None]) -> None:
        self._function, self._batch, self._pad = function, batch, pad
        self._replay: Callable[[], None] | None = None

    def capture(self) -> Callable[[], None]:
        if self._replay is None:
            upload = self._batch._upload
            kept = upload.device.clone(), upload.host.copy()
            self._pad()
            self._replay = captured(self._function)
            upload.device.copy_(kept[0])
            upload.host[:] = kept[1]
        return self._replay

    def __call__(self) -> None:
        self.capture()()


def replay_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture and replay, as a GPU does, in the runners of target and draft and in the device scheduler."""
    step_made, ranked_made = static.Step.__init__, static_shapes._RankedStep.__init__

    def make_step(step: Any, runner: Any, *more: Any) -> None:
        step_made(step, runner, *more)

        def later(function: Callable[[], None]) -> Callable[[], None]:
            return _Later(function, step.batch, lambda: runner._fill(step, []))

        step.run, step.adjusted_draw = later(step.run), later(step.adjusted_draw)
        step.draws = {drawing: later(draw) for drawing, draw in step.draws.items()}

    def make_ranked(step: Any, runner: Any, batch: Any, *more: Any) -> None:
        ranked_made(step, runner, batch, *more)
        pad = lambda: batch.fill_rows([], runner.tables, runner.tree_cache, warm=True)  # noqa: E731
        step.run = _Later(step.run, batch, pad)

    monkeypatch.setattr("ssd.kernels.library.functions", lambda: None)
    monkeypatch.setattr(static.Step, "__init__", make_step)
    monkeypatch.setattr(static_shapes._RankedStep, "__init__", make_ranked)
    for module in (static, static_shapes, overlap):
        monkeypatch.setattr(module, "once", captured)
