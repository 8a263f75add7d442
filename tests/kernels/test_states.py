"""The kernels of recurrences against their plain form, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from ssd.kernels import cpu
from ssd.layers.recurrent import GatedDelta, Recurrence, ShortConvolution, StateRow, sigmoid_mul
from tests.layers.test_recurrent import RECURRENCES, Case, made, noise

pytestmark = pytest.mark.skipif(not cpu.serve(torch.empty(1)), reason="no kernels")


@pytest.mark.parametrize("kind", RECURRENCES)
def test_kernels_compute_what_torch_does(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Case(kind)
    monkeypatch.setattr(cpu, "serve", lambda tensor: False)
    plain = Case(kind)
    assert torch.allclose(found.expected, plain.expected, rtol=1e-5, atol=1e-5)
    assert torch.allclose(found.states, plain.states, rtol=1e-5, atol=1e-5)


def test_gates_of_any_size_do_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head may forget all or nothing, in steps of any size."""
    delta = GatedDelta(torch.tensor([-1e-3, -30.0]), torch.zeros(2), 1, 3, 2)
    changes, queries = noise(8, 3 + 4 + 4, seed=1), noise(8, 3, seed=2)
    changes[:, -2:] = torch.tensor([-100.0, -20.0, -9.0, -1.0, 0.0, 19.0, 21.0, 1000.0])[:, None]
    changes[:, -4:-2] = torch.tensor([-100.0, 100.0, 0.0, 5.0, 1.0, -1.0, 2.0, 3.0])[:, None]

    def outputs() -> torch.Tensor:
        states = torch.zeros(1, *delta.size.state)
        return delta(states, changes[:0], changes, queries, [StateRow(-1, (), 8, 0, 8)])

    found = outputs()
    monkeypatch.setattr(cpu, "serve", lambda tensor: False)
    assert torch.allclose(found, outputs(), rtol=1e-5, atol=1e-6) and found.isfinite().all()


def test_slow_forgetting_is_exact_to_the_last_places() -> None:
    """A step of e^-12 changes a state by its own part, not by that of a rounded 1 + e^-12."""
    delta = GatedDelta(torch.tensor([-16.0]), torch.zeros(1), 1, 1, 1)
    change = torch.tensor([[1.0, 0.0, -1000.0, -12.0]])  # nothing is learnt
    states = torch.ones(1, 1, 1, 1)
    rows = [StateRow(0, (0,) * 1999, 1, 0, 2000)]
    delta(states, change, change, change[:, :1], rows)
    expected = torch.exp(-16 * 2000 * torch.log1p(torch.exp(torch.tensor(-12.0, dtype=torch.float64))))
    assert abs(float(states) / float(expected) - 1) < 2e-4


@pytest.mark.parametrize("size", [1, 16, 37, 20000])
def test_sigmoid_mul(size: int) -> None:
    gate, x = noise(3, size, seed=1) * 20, noise(3, size, seed=2)
    found = sigmoid_mul(gate, x)
    assert torch.allclose(found, gate.sigmoid() * x, rtol=1e-5, atol=1e-6)
    assert torch.equal(found[1:2], sigmoid_mul(gate[1:2], x[1:2]))
    with pytest.raises(ValueError, match="gates"):
        sigmoid_mul(gate[:2], x)


@pytest.mark.parametrize(
    "row",
    [
        StateRow(2, (), 3),
        StateRow(-2, (), 3),
        StateRow(0, (), 3, target=2),
        StateRow(0, (), 3, save=2),
        StateRow(0, (4,), 3),
        StateRow(0, (-1,), 3),
        StateRow(0, (), 4),
        StateRow(0, (), 2),
    ],
)
@pytest.mark.parametrize("kind", ["convolution", "delta"])
def test_what_is_out_of_bounds_is_refused(kind: str, row: StateRow) -> None:
    recurrence, read = made(kind)
    states, changes = torch.zeros(2, *recurrence.size.state), noise(4, recurrence.size.change, seed=1)
    with pytest.raises(IndexError):
        recurrence(states, changes, changes[:3], noise(3, read, seed=2), [row])


def test_other_sizes_are_refused() -> None:
    delta, read = made("delta")
    convolution, _ = made("convolution")

    def refused(recurrence: Recurrence, states: torch.Tensor, change: int, queries: int) -> None:
        changes = noise(3, change, seed=1)
        with pytest.raises(ValueError):
            recurrence(states, changes, changes, noise(3, queries, seed=2), [StateRow(0, (), 3)])

    refused(delta, torch.zeros(2, *delta.size.state), delta.size.change + 1, read)
    refused(delta, torch.zeros(2, *delta.size.state), delta.size.change, read - 1)
    refused(delta, torch.zeros(2, 4, 32, 33), delta.size.change, read)
    refused(delta, torch.zeros(2, 4, 32, 64)[..., ::2], delta.size.change, read)
    refused(convolution, torch.zeros(2, *convolution.size.state), convolution.size.change - 1, 0)
    refused(convolution, torch.zeros(2, 4, 150), convolution.size.change, 0)
    refused(ShortConvolution(noise(8, 65, seed=1)), torch.zeros(2, 64, 8), 8, 0)
