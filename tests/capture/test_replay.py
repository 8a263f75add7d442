"""A replay does what a CUDA graph does: the same operations on the same memory, and nothing of what Python does."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.capture.replay import captured
from tests.capture.watch import Fault


class World:
    """Tensors and numbers that captured functions read and leave."""

    def __init__(self) -> None:
        self.inputs, self.result, self.number = torch.arange(6.0).view(2, 3), torch.zeros(2, 3), 2.0
        self.kept: Tensor | None = None


def leave(world: World, result: Any) -> None:
    world.result = result


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "result in a new tensor": lambda x: x + 1.0,
    "view of it": lambda x: (x * 2.0).T[1:].unsqueeze(0),
    "view of an input": lambda x: x.T[1:],
    "in place": lambda x: x.clone().add_(1.0).mul_(3.0),
    "in place by a view": lambda x: torch.zeros(4, 3).index_copy_(0, torch.arange(2) * 2, x),
    "assignment to a part": lambda x: (y := torch.zeros(3, 4), y[1:, :2].copy_(x[:, 1:].T))[0],
    "other types": lambda x: (x.int() + 1).to(torch.float64).half(),
    "copy into another type": lambda x: torch.zeros(2, 3, dtype=torch.int32).copy_(x * 1.7),
    "bits of another type": lambda x: x.view(torch.int32).clone() + 1,
    "several results": lambda x: torch.stack((x.max(-1).values, x.max(-1).indices.float())),
    "list of tensors": lambda x: torch.cat([x, x[:1], *x.split(1)]),
    "index": lambda x: torch.arange(24.0).view(4, 6)[x[0].long(), :2],
    "condition": lambda x: torch.where(x > 2.0, x, -1.0),
    "products": lambda x: torch.nn.functional.linear(x, torch.ones(5, 3)) @ torch.ones(5, 2),
    "reshaped copy": lambda x: x.T.reshape(-1).cumsum(0),
    "zeros that are filled": lambda x: torch.zeros_like(x).masked_fill_(x < 2.0, 7.0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_those_of_the_present_inputs_in_the_same_memory(name: str) -> None:
    world = World()
    replay = captured(lambda: leave(world, FUNCTIONS[name](world.inputs)))
    result, address = world.result, world.result.data_ptr()
    for numbers in ([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]], [[0.0, 3.0, 1.0], [2.0, 2.0, 2.0]]):
        world.inputs.copy_(torch.tensor(numbers))
        replay()
        assert world.result is result and result.data_ptr() == address
        assert torch.equal(result, FUNCTIONS[name](world.inputs))


def test_the_capture_itself_leaves_no_result() -> None:
    world = World()
    replay = captured(lambda: leave(world, world.inputs + 1.0))
    assert world.result.isnan().all()
    replay()
    assert torch.equal(world.result, world.inputs + 1.0)


def test_python_is_not_run_again() -> None:
    """A number of Python, a tensor that takes an input's place, one that is made once: the graph has the old ones."""
    world, calls = World(), list[int]()

    def function() -> None:
        calls.append(1)
        world.kept = torch.ones(2, 3) * 5.0 if world.kept is None else world.kept
        leave(world, world.inputs * world.number + world.kept)

    replay, old, before = captured(function), world.inputs, len(calls)
    world.number, world.kept, world.inputs = 3.0, None, torch.zeros(2, 3)
    replay()
    assert torch.equal(world.result, old * 2.0 + 5.0) and len(calls) == before


def test_memory_that_nothing_else_refers_to_is_lost() -> None:
    """Another graph of the pool overwrites it; what is referred to stays."""
    world = World()

    def function() -> None:
        world.kept = world.inputs + 1.0
        leave(world, world.kept * 2.0)

    replay = captured(function)
    replay()
    assert world.kept is not None
    numbers = (ctypes.c_float * 6).from_address(world.kept.data_ptr())  # no reference
    assert np.isfinite(list(numbers)).all()
    world.kept = None
    replay()
    assert torch.equal(world.result, (world.inputs + 1.0) * 2.0) and np.isnan(list(numbers)).all()


@triton.jit
def double_kernel(x, out, factor, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, SIZE)
    tl.store(out + places, tl.load(x + places) * factor)


def test_kernels_of_triton_are_repeated() -> None:
    world = World()
    world.inputs = torch.arange(8.0)

    def function() -> None:
        doubled = torch.empty(8)
        double_kernel[(1,)](world.inputs + 1.0, doubled, world.number, SIZE=8)
        leave(world, doubled - 1.0)

    replay = captured(function)
    world.number = 5.0
    world.inputs.copy_(torch.arange(8.0) * 3.0)
    replay()
    assert torch.equal(world.result, (world.inputs + 1.0) * 2.0 - 1.0)


FAULTS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x[0, 0]),
    "condition": lambda x: 1 if x.any() else 2,
    "length of a tensor": lambda x: range(int(x[0, 0])),
    "list": lambda x: x[0].tolist(),
    "array": lambda x: x.numpy(),
    "array of NumPy's": lambda x: np.asarray(x),
    "address, which a C kernel reads": lambda x: x.data_ptr(),
    "numbers of the host": lambda x: x + torch.tensor([1.0] * 3),
    "mask as index": lambda x: x[x > 0],
    "nonzero": lambda x: (x > 0).nonzero(),
    "list as index": lambda x: x[:, [1, 2]],
    "equal": lambda x: torch.equal(x, x),
    "random numbers": lambda x: torch.rand(3),
    "random numbers in place": lambda x: x.clone().exponential_(),
    "other sizes": lambda x: torch.empty(0).resize_(3),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_no_graph_can_hold_is_found_with_its_line(name: str) -> None:
    world = World()
    with pytest.raises(Fault, match=r"test_replay.py:\d+: "):
        captured(lambda: leave(world, FAULTS[name](world.inputs)))
