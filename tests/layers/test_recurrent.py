"""Recurrences: a token's output and the states have the same bits in any cut, with rejected tokens in between."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from ssd.kernels import cpu
from ssd.layers import recurrent
from ssd.layers.recurrent import GatedDelta, Recurrence, ShortConvolution, StateRow

TOKENS = 37
RECURRENCES = (
    "convolution",
    "convolution with a bias",
    "delta",
    "delta of odd sizes",
    "delta of one head",
    "tiled delta",
)


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def made(kind: str) -> tuple[Recurrence, int]:
    """A recurrence, and the numbers of a token's queries."""
    if kind.startswith("convolution"):
        biased = kind.endswith("bias")
        return ShortConvolution(noise(150, 4, seed=1), noise(150, seed=2) if biased else None, silu=biased), 0
    heads, key_heads, key_dim, value_dim = {"delta": (4, 2, 32, 32), "delta of one head": (1, 1, 2, 1)}.get(
        kind, (6, 2, 9, 35)
    )
    sizes, tiled = (key_heads, key_dim, value_dim), kind.startswith("tiled")
    delta = GatedDelta(-noise(heads, seed=1).exp(), noise(heads, seed=2), *sizes, tiled)
    return delta, key_heads * key_dim


class Case:
    """A recurrence, a text's changes and queries, what one row of all makes of them, and the state after each token."""

    def __init__(self, kind: str) -> None:
        self.recurrence, self.read = made(kind)
        self.changes, self.queries = (
            noise(TOKENS, self.recurrence.size.change, seed=3),
            noise(TOKENS, self.read, seed=4),
        )
        self.states = torch.full((TOKENS + 1, *self.recurrence.size.state), torch.nan)
        self.kept = torch.full((2 * TOKENS, self.recurrence.size.change), torch.nan)
        self.states[0] = 0.0
        given = self.states, self.kept, self.changes, self.queries
        one_by_one = [StateRow(token, (), 1, token + 1, 1) for token in range(TOKENS)]
        self.expected = self.recurrence(*given, one_by_one)
        states, rows = (
            torch.full_like(self.states[:2], torch.nan),
            [StateRow(-1, (), TOKENS, 0, TOKENS, 1, TOKENS // 2)],
        )
        assert torch.equal(self.recurrence(states, *given[1:], rows), self.expected)
        assert torch.equal(states, self.states[[TOKENS, TOKENS // 2]])

    def junk(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        return noise(count, self.changes.shape[1], seed=seed), noise(count, self.read, seed=seed + 1)


@pytest.fixture(params=["kernels", "torch", "triton"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "kernels":
        monkeypatch.setattr(cpu, "serve", lambda tensor: False)
        monkeypatch.setattr(recurrent, "fuses", lambda device: request.param == "triton")
    elif not cpu.serve(torch.empty(1)):
        pytest.skip("no kernels")
    return str(request.param)


@pytest.mark.parametrize("kind", RECURRENCES)
def test_any_cut_gives_the_same_bits(form: str, kind: str) -> None:
    """Each row makes some accepted tokens again, then has some right ones and some that will be rejected."""
    case, chance = Case(kind), random.Random(0)
    assert case.expected.isfinite().all() and case.expected.std() > 0
    for trial in range(1 if form == "triton" else 8):  # its interpreter is slow
        states, kept = torch.full_like(case.states[:2], torch.nan), case.kept.clone()
        places = chance.sample(range(2 * TOKENS), TOKENS)
        base = start = 0
        while start < TOKENS:
            right, wrong = min(chance.choice((1, 1, 2, 9)), TOKENS - start), chance.randrange(4)
            junk = case.junk(wrong, seed=trial)
            changes = torch.cat((case.changes[start : start + right], junk[0]))
            queries = torch.cat((case.queries[start : start + right], junk[1]))
            written, saved = (chance.randint(0, start - base + right) for _ in range(2))
            row = StateRow(0 if base else -1, places[base:start], right + wrong, 0, written, 1, saved)
            out = case.recurrence(states, kept, changes, queries, [row])
            kept[places[start : start + right]] = case.changes[start : start + right]
            assert torch.equal(out[:right], case.expected[start : start + right])
            assert torch.equal(states[1], case.states[base + saved])
            base, start = base + written, start + right
            assert torch.equal(states[0], case.states[base])


@pytest.mark.parametrize("kind", RECURRENCES)
def test_rows_of_a_batch_have_the_same_bits_as_alone(form: str, kind: str) -> None:
    """And a row begins with what an earlier one has written."""
    case = Case(kind)
    states, kept = torch.full_like(case.states[:3], torch.nan), case.kept.clone()
    kept[[5, 3]] = case.changes[8:10]
    junk = case.junk(4, seed=7)
    cuts = [slice(0, 3), slice(3, 8), slice(10, 11), slice(0, 6), slice(11, 12)]
    rows = [
        StateRow(-1, (), 3, 2, 3),
        StateRow(2, (), 5 + 4, 1, 5),
        StateRow(1, (5, 3), 1, 1, 3, 0, 1),
        StateRow(-1, (), 6),
        StateRow(1, (), 1, 2, 0),
    ]
    changes = [case.changes[cut] for cut in cuts]
    queries = [case.queries[cut] for cut in cuts]
    changes.insert(2, junk[0])
    queries.insert(2, junk[1])
    out = case.recurrence(states, kept, torch.cat(changes), torch.cat(queries), rows).split([3, 5, 4, 1, 6, 1])
    for part, cut in zip((*out[:2], *out[3:]), cuts, strict=True):
        assert torch.equal(part, case.expected[cut])
    for slot, count in ((0, 9), (1, 11), (2, 11)):
        assert torch.equal(states[slot], case.states[count])


def test_the_torch_form_keeps_the_type_of_its_inputs() -> None:
    """In bfloat16 states stay float32."""
    for kind in RECURRENCES:
        recurrence, read = made(kind)
        states = torch.zeros(1, *recurrence.size.state)
        changes, queries = noise(3, recurrence.size.change, seed=3).bfloat16(), noise(3, read, seed=4).bfloat16()
        out = recurrence(states, changes[:0], changes, queries, [StateRow(-1, (), 3, 0, 3)])
        assert out.dtype == torch.bfloat16 and out.isfinite().all() and states.abs().sum() > 0


def test_a_convolution_is_that_of_torch(form: str) -> None:
    weight, bias, x = noise(20, 3, seed=1), noise(20, seed=2), noise(9, 20, seed=3)
    expected = torch.nn.functional.conv1d(x.t()[None], weight[:, None], bias, padding=2, groups=20)[0, :, :9].t()
    convolution = ShortConvolution(weight, bias)
    states = torch.zeros(1, *convolution.size.state)
    found = convolution(states, x[:0], x, x[:, :0], [StateRow(-1, (), 9, 0, 9)])
    assert torch.allclose(found, expected, atol=1e-6) and torch.equal(states[0], x[-2:])


def test_the_delta_rule_is_that_of_its_paper(form: str) -> None:
    """In float64, for one head: the state forgets, and a key's value is replaced in part."""
    delta = GatedDelta(torch.tensor([-2.0]), torch.tensor([0.3]), 1, 5, 4)
    changes, queries, state = noise(6, 5 + 4 + 2, seed=1), noise(6, 5, seed=2), torch.zeros(5, 4, dtype=torch.float64)
    states, expected = torch.zeros(1, 1, 5, 4), []
    for change, query in zip(changes.double(), queries.double(), strict=True):
        k, v, b, a = change.split([5, 4, 1, 1])
        k, q, beta = k / k.norm(), query / query.norm() * 5**-0.5, b.sigmoid()
        state = torch.exp(-2 * torch.nn.functional.softplus(a + 0.3)) * (state - beta * torch.outer(k, k @ state))
        state = state + beta * torch.outer(k, v)
        expected.append(q @ state)
    found = delta(states, changes[:0], changes, queries, [StateRow(-1, (), 6, 0, 6)])
    assert torch.allclose(found.double(), torch.stack(expected), atol=1e-6)
    assert torch.allclose(states[0, 0].double(), state, atol=1e-6)


def test_tiled_heads_are_those_of_key_heads_in_turn(form: str) -> None:
    """Heads 0 and 2 have the first key head, 1 and 3 the second: the same as when they lie beside each other."""
    order, decay, bias = torch.tensor([0, 2, 1, 3]), -noise(4, seed=1).exp(), noise(4, seed=2)
    changes, queries = noise(5, 2 * 3 + 4 * 2 + 8, seed=3), noise(5, 2 * 3, seed=4)
    k, v, b, a = changes.split([6, 8, 4, 4], 1)
    moved = torch.cat((k, v.view(5, 4, 2)[:, order].flatten(1), b[:, order], a[:, order]), 1)
    rows = [StateRow(-1, (), 5)]
    tiled = GatedDelta(decay, bias, 2, 3, 2, tiled=True)(torch.zeros(1, 4, 3, 2), changes[:0], changes, queries, rows)
    plain = GatedDelta(decay[order], bias[order], 2, 3, 2)(torch.zeros(1, 4, 3, 2), moved[:0], moved, queries, rows)
    assert torch.equal(tiled.view(5, 4, 2)[:, order], plain.view(5, 4, 2))
