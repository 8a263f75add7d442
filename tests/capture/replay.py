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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from ssd.draft import static_shapes
from ssd.execution import static
from ssd.execution.tables import BatchTensors
from ssd.verifier import inline_draft, overlap
from tests.capture.watch import MADE, Fault, Listen, check_waits, where

# Values that Python, NumPy or a C kernel reads.
_TO_HOST = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.__dlpack__)
# Change more of a tensor than its numbers.
_RESHAPED = {"resize_", "resize_as_", "set_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_"}


_run_kernel = GridExecutor.__call__


class _Number(int):
    """Stands for a tensor among the arguments of an operation: which one it is of all tensors of the run."""


class _Launch(NamedTuple):
    """An operation as it has run. `args` are all arguments, the last ones have `names`; `results` are its new tensors:
    place among all results, number, and whether the memory is new, too."""

    run: Callable[..., Any]
    args: list[Any]
    names: tuple[str, ...]
    results: list[tuple[int, _Number, bool]]

    @property
    def changes(self) -> bool:
        """True if it writes to its arguments."""
        return self.run is _run_kernel or bool(self.run._schema.is_mutable)  # type: ignore[attr-defined]

    @property
    def makes_only_room(self) -> bool:
        return self.run is not _run_kernel and self.run.overloadpacket.__name__ in MADE  # type: ignore[attr-defined]


class _Step(NamedTuple):
    """An operation as it is repeated. `open` are the places of arguments that hold numbers. `results` have their place
    and either their number or the memory that they are copied to. `over`: numbers that nothing reads later."""

    launch: _Launch
    args: list[Any]
    open: list[int]
    results: list[tuple[int, _Number, Tensor | None]]
    over: list[_Number]


class Recording:
    """Repeats the operations of a run.

    Results that something else refers to when the run is over keep their memory. Others are made anew."""

    def __init__(self, launches: list[_Launch], tensors: list[Tensor]) -> None:
        """Empties `tensors`, whose places are the numbers in `launches`."""
        memories = [_memory(tensor) for tensor in tensors]
        aliases: list[Tensor | None] = [_alias(tensor) for tensor in tensors]
        tensors.clear()
        made = {memories[number] for launch in launches for _, number, new in launch.results if new}
        own = Counter(memories)
        lost = {memory for memory in made if _references(memory) == own[memory]}
        self._fixed = [None if memory in lost else alias for memory, alias in zip(memories, aliases, strict=True)]
        self._steps = _steps(launches, self._fixed)
        self._kept = {memory: self._fixed[number] for number, memory in enumerate(memories) if memory in made - lost}
        self._own = {memory: own[memory] for memory in self._kept}

    @torch.inference_mode()
    def __call__(self) -> None:
        values: list[Any] = [None] * len(self._fixed)
        for launch, args, places, results, over in self._steps:
            if places:
                args = args.copy()
                for place in places:
                    args[place] = _filled(args[place], values)
            found = _run(launch, args)
            for place, number, memory in results:
                result = found if isinstance(found, Tensor) else found[place]
                if memory is None:
                    values[number] = result
                else:
                    memory.copy_(result)
            for number in over:
                values[number] = None
        self.spoil()

    def spoil(self, everything: bool = False) -> None:
        """Leave garbage in results that nothing else refers to any more, or in all."""
        for memory, result in self._kept.items():
            if everything or _references(memory) == self._own[memory]:
                _spoil(result)


def _steps(launches: list[_Launch], fixed: list[Tensor | None]) -> list[_Step]:
    """Return the operations to repeat; `fixed` are the tensors whose memory stays."""
    steps, read = list[_Step](), set[_Number]()
    for launch in reversed(launches):
        results = [
            (place, number, fixed[number]) for place, number, new in launch.results if new or fixed[number] is None
        ]
        if launch.makes_only_room:
            results = [result for result in results if result[2] is None]
        if results or launch.changes:
            args = [_bound(arg, fixed) for arg in launch.args]
            open_args = {place: found for place, arg in enumerate(args) if (found := {*_numbers(arg)})}
            used = {number for _, number, memory in results if memory is None}.union(*open_args.values())
            steps.append(_Step(launch, args, [*open_args], results, [*used - read]))
            read |= used
    return steps[::-1]


def _run(launch: _Launch, args: list[Any]) -> Any:
    count = len(args) - len(launch.names)
    found = launch.run(*args[:count], **dict(zip(launch.names, args[count:], strict=True)))
    if launch.makes_only_room:
        _spoil(found)
    return found


def _bound(given: Any, fixed: list[Tensor | None]) -> Any:
    """An argument with the tensors whose memory stays in place of their numbers."""
    if isinstance(given, list):
        return [_bound(part, fixed) for part in given]
    return given if not isinstance(given, _Number) or fixed[given] is None else fixed[given]


def _filled(given: Any, values: list[Any]) -> Any:
    """An argument with tensors in place of numbers."""
    if isinstance(given, list):
        return [_filled(part, values) for part in given]
    return values[given] if isinstance(given, _Number) else given


def _numbers(given: Any) -> Iterator[_Number]:
    if isinstance(given, _Number):
        yield given
    for part in given if isinstance(given, list) else ():
        yield from _numbers(part)


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_GARBAGE = {torch.bool: True} | {dtype: torch.iinfo(dtype).max // 2 for dtype in _INTEGERS}


def _spoil(tensor: Tensor) -> None:
    tensor.fill_(_GARBAGE.get(tensor.dtype, torch.nan))


def _memory(tensor: Tensor) -> int:
    """Where the memory of a tensor begins; 0 for weights in a layout of oneDNN's, which hides theirs."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0


def _alias(tensor: Tensor) -> Tensor:
    return torch.ops.aten.alias.default(tensor) if _memory(tensor) else tensor


def _references(memory: int) -> int:
    """Count the tensors that have this memory."""
    return torch._C._storage_Use_Count(memory) - 1  # the question holds one, too


class _Recorder(TorchDispatchMode):
    """Lists operations, with numbers in place of tensors. It holds these, so that they keep their ids."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[_Launch] = []
        self.tensors: list[Tensor] = []
        self._known: dict[int, _Number] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        check_waits(func, [*_tensors((*args, *kwargs.values()))])
        if torch.Tag.nondeterministic_seeded in func.tags or name in _RESHAPED:
            raise Fault(f"{func} cannot be recorded{where()}")
        results = func(*args, **kwargs)
        self.add(func, args, kwargs, results)
        return results

    def add(self, run: Callable[..., Any], args: Any, kwargs: Any, results: Any = None) -> None:
        """Add what has run, with its results."""
        arguments = [*args, *kwargs.values()]
        given = {_memory(tensor) for tensor in _tensors(arguments)}
        numbered = [self._numbered(argument) for argument in arguments]
        known, made = len(self.tensors), []
        for place, result in enumerate(results if isinstance(results, list | tuple) else (results,)):
            if isinstance(result, Tensor) and (number := self._numbered(result)) >= known:
                made.append((place, number, _memory(result) not in given))
        launch = _Launch(run, numbered, tuple(kwargs), made)
        if made or launch.changes:
            self.launches.append(launch)

    def _numbered(self, given: Any) -> Any:
        """An argument with numbers in place of tensors."""
        if isinstance(given, list | tuple):
            return [self._numbered(part) for part in given]
        if not isinstance(given, Tensor):
            return given
        if id(given) not in self._known:
            self._known[id(given)] = _Number(len(self.tensors))
            self.tensors.append(given)
        return self._known[id(given)]


def _tensors(given: Any) -> Iterator[Tensor]:
    """The tensors among the arguments of an operation, those in lists too."""
    for part in given:
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, list | tuple):
            yield from _tensors(part)


class _Listen(Listen):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TO_HOST:
            raise Fault(f"{func.__name__} waits for numbers of the device{where()}")
        return super().__torch_function__(func, types, args, kwargs)


@torch.inference_mode()
def captured(function: Callable[[], None]) -> Callable[[], None]:
    """Stand in for `ssd.execution.graphs.GraphPool.capture`. The capture itself leaves only garbage in the results."""
    if isinstance(function, _Later):
        return function.capture()
    recorder = _Recorder()

    def launch(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        # It does not run, as in a capture: the interpreter takes its time.
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            recorder.add(_run_kernel, (executor, *args), kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GridExecutor, "__call__", launch)
        function()  # what it makes once, it has made before the capture
        recorder = _Recorder()
        with _Listen(), recorder:
            function()
    recording = Recording(recorder.launches, recorder.tensors)
    recording.spoil(everything=True)
    return recording


class _Later:
    """Captures a function when it is first called, as few tests use all shapes.

    Its `batches` are filled with padding meanwhile, as at a warm-up; other tensors that it changes are given, too."""

    def __init__(
        self, function: Callable[[], None], batches: Sequence[BatchTensors], pad: Callable[[], None], *more: Tensor
    ) -> None:
        self._function, self._pad = function, pad
        uploads = [batch._upload for batch in batches]
        self._changed = [*more, *(each.device for each in uploads), *(each._host for each in uploads)]
        self._replay: Callable[[], None] | None = None

    def capture(self) -> Callable[[], None]:
        if self._replay is None:
            kept = [tensor.clone() for tensor in self._changed]
            self._pad()
            self._replay = captured(self._function)
            for tensor, before in zip(self._changed, kept, strict=True):
                tensor.copy_(before)
        return self._replay

    def __call__(self) -> None:
        self.capture()()


def replay_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture and replay, as a GPU does, in the runners of target and draft, in the device scheduler and its draft."""
    step_made, ranked_made = static.StaticForward.__init__, static_shapes._RankedStep.__init__

    def make_step(step: Any, runner: Any, *more: Any) -> None:
        step_made(step, runner, *more)

        def later(function: Callable[[], None]) -> Callable[[], None]:
            return _Later(function, [step.batch], lambda: runner._fill(step, []))

        step.run = later(step.run)
        step.draws = {drawing: later(draw) for drawing, draw in step.draws.items()}

    def make_ranked(step: Any, runner: Any, batch: Any, *more: Any) -> None:
        ranked_made(step, runner, batch, *more)
        pad = lambda: batch.fill_rows([], runner.tables, runner.tree_cache, warm=True)  # noqa: E731
        step.run, step.more = _Later(step.run, [batch], pad), _Later(step.more, [batch], pad)

    loop_made = inline_draft._Loop.__init__

    def make_loop(loop: Any, draft: Any, *more: Any) -> None:
        loop_made(loop, draft, *more)
        steps, changed = (loop._one, loop._two), (draft.work, draft.drafted)

        def pad() -> None:
            draft.work[:, 2] = -1
            for step in steps:  # kernels of Triton do not run while they are captured
                draft.runner._fill(step, [])

        for name in ("first", "one", "rest"):
            setattr(loop, name, _Later(getattr(loop, name), [step.batch for step in steps], pad, *changed))

    monkeypatch.setattr("ssd.kernels.library.functions", lambda: None)
    monkeypatch.setattr(inline_draft._Loop, "__init__", make_loop)
    monkeypatch.setattr(static.StaticForward, "__init__", make_step)
    monkeypatch.setattr(static_shapes._RankedStep, "__init__", make_ranked)
    for module in (static, static_shapes, overlap):
        monkeypatch.setattr(module, "once", captured)
    monkeypatch.setattr(inline_draft, "once", lambda function: function)
