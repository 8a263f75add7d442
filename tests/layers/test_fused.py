"""The kernels between products, by Triton's interpreter: against double precision, and bit for bit in any batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.execution.batch import Row
from ssd.execution.static import StaticRunner
from ssd.kernels import cpu
from ssd.layers import norm
from ssd.layers.attention import CachePlaces
from ssd.layers.norm import OffsetRMSNorm, RMSNorm
from ssd.layers.rotary import Frequencies, Rotary, turned
from ssd.layers.triton_fused import gated, rms_norm
from ssd.models import registry
from ssd.models.checkpoint import inspect
from ssd.models.families import llama
from tests.models import tiny

# The interpreter cuts digits off where it makes bfloat16; float16 it rounds, as a GPU rounds both.
DTYPES = (torch.float32, torch.float16)
ERROR = {torch.float32: 2e-6, torch.float16: 2.0**-11 + 2e-6}  # of the last rounding, in parts of the number


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(found: Tensor, exact: Tensor, roundings: int = 1) -> None:
    """`roundings`: of numbers as large as the largest, on the way."""
    least = roundings * ERROR[found.dtype] * float(exact.abs().max())
    assert found.shape == exact.shape
    assert (
        (found.double() - exact).abs() <= ERROR[found.dtype] * exact.abs() + (least if roundings > 1 else 1e-6)
    ).all()


def check_rows(function: Callable[..., Tensor], *rows: Tensor) -> None:
    """A row alone, and in another place, has the same bits."""
    whole, order = function(*rows), torch.tensor([3, 0, 4, 2, 1])
    assert torch.equal(function(*(part[order] for part in rows)), whole[order])
    for index in range(5):
        assert torch.equal(function(*(part[index : index + 1] for part in rows))[0], whole[index])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 100, 1152])
def test_norms(size: int, dtype: torch.dtype) -> None:
    x, y, weight = drawn(5, size, dtype=dtype) * 3, drawn(5, size, dtype=dtype, seed=1), drawn(size, seed=2)
    scaled = weight * size**0.5
    own, behind = (scaled, size * 1e-5), (scaled.flip(0), size * 1e-3)

    def exact(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rows.double() / (rows.double().square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()

    for added, first in ((None, None), (y, None), (y, behind)):
        total, normed = rms_norm(x, own, added, first)
        more = added if first is None else rms_norm(y, behind)[1]
        assert torch.equal(total, x if more is None else x + more)
        check(normed, exact(total, weight, 1e-5))
    check(rms_norm(y, behind)[1], exact(y, weight.flip(0), 1e-3))
    check_rows(lambda x, y: rms_norm(x, own, y, behind)[1], x, y)
    strided = torch.cat((x, x), dim=1)[:, :size]
    assert torch.equal(rms_norm(strided, own)[1], rms_norm(x, own)[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gelu", [False, True], ids=["silu", "gelu"])
def test_gated_activations(gelu: bool, dtype: torch.dtype) -> None:
    x = drawn(5, 2 * 1100, dtype=dtype) * 4
    x[0, :3] = torch.tensor([90.0, -90.0, 0.0])
    gate, up = x.double().chunk(2, dim=1)
    check(gated(x, gelu), (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up, 2)
    check_rows(lambda x: gated(x, gelu), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "part"), [(64, 64), (80, 80), (96, 48)], ids=str)
@pytest.mark.parametrize("offset", [None, False, True], ids=["plain", "normed", "normed by 1 + weight"])
def test_heads_are_normed_turned_and_stored(offset: bool | None, dim: int, part: int, dtype: torch.dtype) -> None:
    heads, kv_heads, slots = 4, 2, torch.tensor([7, 2, 30, 11, 0])
    x, positions = drawn(5, heads + 2 * kv_heads, dim, dtype=dtype), torch.tensor([3, 90, 0, 17, 64])
    rotary = Rotary(Frequencies(10000.0 ** -(torch.arange(0, part, 2) / part), 1.3), 100, dtype)
    norms = [(OffsetRMSNorm if offset else RMSNorm)(drawn(dim, dtype=dtype, seed=seed), 1e-6) for seed in (1, 2)]
    norms = norms if offset is not None else []

    def run(x: Tensor, positions: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = torch.full((2, 40, kv_heads, dim), torch.nan, dtype=dtype)
        q = turned(x, kv_heads, rotary.at(positions), norms, CachePlaces(keys, values, slots, lambda q, _: q))
        assert keys[slots].isfinite().all() and int(keys.isnan().sum()) == (40 - len(slots)) * kv_heads * dim
        return q, keys[slots], values[slots]

    q, keys, values = run(x, positions, slots)
    wide = x.double()
    scaled = [
        part / (part.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (own.weight / dim**0.5).double()
        for part, own in zip((wide[:, :heads], wide[:, heads:-kv_heads]), norms, strict=False)
    ]
    normed = torch.cat(scaled, dim=1) if scaled else wide[:, :-kv_heads]
    cos, sin = (table.double() for table in rotary.at(positions))
    expected = normed.clone()
    expected[..., :part] = normed[..., :part] * cos + normed[..., :part].roll(part // 2, -1) * sin
    check(torch.cat((q, keys), dim=1), expected, 3 if norms else 2)
    assert torch.equal(values, x[:, -kv_heads:])
    check_rows(lambda *rows: torch.cat(run(*rows), dim=1), x, positions, slots)


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 8},
}


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_model_computes_the_same_with_them(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_fused(tiny.model(kind, tmp_path, **FAMILIES[kind]), monkeypatch)


def check_fused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = list[str]()
    monkeypatch.setattr(cpu, "present", lambda _: False)

    def logits() -> tuple[Tensor, Tensor]:
        model = registry.load(inspect(directory), torch.float32, tiny.CPU, 64)
        runner = StaticRunner(model, 20, 4, most_rows=2, longest=8, layers=(1,))
        runner.cache.keys.zero_(), runner.cache.values.zero_()
        runner.forward([Row(tiny.token_ids(6, 1), 0, range(5), outputs=6)])
        rows = [Row(tiny.token_ids(5, 2), 6, range(5), outputs=5), Row(tiny.token_ids(3, 3), 0, range(5, 9), 3, slot=1)]
        context = runner.prepare(rows, (1,))
        return runner.forward(rows, context).clone(), context.hidden[1]

    plain = logits()
    for module in (norm, llama):
        monkeypatch.setattr(module, "fuses", lambda device: launched.append(str(device)) or True)
    fused = logits()
    assert launched
    for ours, expected in zip(fused, plain, strict=True):
        assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-4)


class Mirrored(Rotary):
    def __call__(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        return super().__call__(x.flip(-1), table)


@pytest.mark.usefixtures("replayed")
def test_a_rotation_of_ones_own_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "Rotary", Mirrored)
    check_fused(tiny.llama(tmp_path), monkeypatch)


class Shifted(RMSNorm):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x) + 1


def test_a_norm_of_ones_own_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "fuses", lambda _: True)
    monkeypatch.setattr(cpu, "present", lambda _: False)
    x, y, own, other = drawn(5, 64), drawn(5, 64, seed=1), Shifted(drawn(64, seed=2), 1e-5), RMSNorm(drawn(64), 1e-5)
    assert torch.equal(own.added(x, y)[1], own(x + y))
    assert torch.allclose(other.added(x, y, own)[0], x + own(y))
    assert torch.allclose(other.added(x, y, other)[1], other(x + other(y)))
