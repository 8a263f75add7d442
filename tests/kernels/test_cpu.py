"""Our kernels against the definitions, and for every row the same bits whatever its company."""

from __future__ import annotations

from array import array
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.kernels import cpu
from ssd.kernels.attention import KVSpans

pytestmark = pytest.mark.skipif(not cpu.serve(torch.empty(0)), reason="no C compiler: there are no kernels")
SIZES = (1, 7, 16, 64, 100, 576, 1537)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def same_alone(function: object, x: Tensor) -> None:
    """Each row by itself has the bits that it has beside the others."""
    assert callable(function)
    together = function(x)
    for row in range(len(x)):
        assert torch.equal(function(x[row : row + 1]), together[row : row + 1]), row


@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(size: int) -> None:
    x, weight = numbers(5, size) * torch.logspace(-3, 3, 5)[:, None], numbers(size)
    expected = F.rms_norm(x.double(), (size,), weight.double(), 1e-5)
    assert torch.allclose(cpu.rms_norm(x, weight, 1e-5).double(), expected, rtol=1e-6, atol=0)
    same_alone(lambda rows: cpu.rms_norm(rows, weight, 1e-5), x)
    wide = torch.cat((x, x), dim=1)
    assert torch.equal(cpu.rms_norm(wide[:, size:], weight, 1e-5), cpu.rms_norm(x, weight, 1e-5))
    heads = numbers(5, 3, size)[:, 1:]
    assert torch.equal(cpu.rms_norm(heads, weight, 1e-5)[:, 0], cpu.rms_norm(heads[:, 0], weight, 1e-5))


@pytest.mark.parametrize("size", SIZES)
def test_silu_mul(size: int) -> None:
    x = torch.cat((torch.linspace(-120, 120, 4 * size).view(4, size), numbers(4, size)), dim=1)
    gate, up = x.double().chunk(2, dim=1)
    assert torch.allclose(cpu.silu_mul(x).double(), F.silu(gate) * up, rtol=1e-6, atol=1e-30)
    same_alone(cpu.silu_mul, x)


def test_rotate() -> None:
    x, cos, sin = numbers(5, 7, 12), numbers(5, 1, 12), numbers(5, 1, 12)
    seen = x[:, 1:5]
    assert torch.allclose(cpu.rotate(seen, cos, sin), seen * cos + seen.roll(6, -1) * sin, atol=1e-6)
    same_alone(lambda rows: cpu.rotate(rows, cos[: len(rows)], sin[: len(rows)]), x[:1].expand(5, -1, -1)[:1])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 128), (4, 2, 12), (2, 1, 1), (3, 1, 80)])
@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize(("softcap", "sunk"), [(None, False), (2.0, False), (None, True)])
def test_attention_over_shared_and_own_keys(
    heads: int, kv_heads: int, dim: int, window: int | None, softcap: float | None, sunk: bool
) -> None:
    """Tokens with any number of keys in scattered slots of a cache, and own ones in another, layer 1 of 2."""
    stores = [(numbers(2, 90, kv_heads, dim), numbers(2, 90, kv_heads, dim) + 1) for _ in range(2)]
    slots = [array("q", torch.randperm(90, generator=torch.Generator().manual_seed(i)).tolist()) for i in range(2)]
    begin, counts, own_begin, own_counts = [0, 3, 50, 7], [1, 70, 16, 33], [0, 5, 20, 80], [1, 3, 9, 2]
    shared = KVSpans(stores[:1], slots[0], begin, counts)
    own = KVSpans(stores[1:], slots[1], own_begin, own_counts)
    q, k, v = numbers(4, heads, dim), numbers(4, kv_heads, dim), numbers(4, kv_heads, dim)
    own.put(1, k, v)
    out, alone = torch.empty(4, heads * dim), torch.empty(4, heads * dim)
    sinks = torch.linspace(-2, 4, heads)
    rest = softcap, window, own, sinks if sunk else None
    shared.attend(1, q, out, range(4), 0.3, *rest)
    shared.attend(1, q, alone, range(2, 3), 0.3, *rest)
    assert torch.equal(alone[2], out[2])
    for token in range(4):
        where = slots[0][begin[token] :][: counts[token]], slots[1][own_begin[token] :][: own_counts[token]]
        assert torch.equal(stores[1][0][1, where[1][-1]], k[token])
        pairs = list(zip(stores, where, strict=True))
        keys, values = (torch.cat([store[kind][1, at] for store, at in pairs]) for kind in (0, 1))
        if window is not None:
            keys, values = keys[-window:], values[-window:]
        repeated = heads // kv_heads
        scores = torch.einsum("hd,lhd->hl", q[token], keys.repeat_interleave(repeated, 1)).double() * 0.3
        scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
        beside = sinks.double()[:, None] if sunk else torch.full((heads, 1), -torch.inf)
        weights = torch.cat((scores, beside), -1).softmax(-1)[:, :-1]
        mixed = torch.einsum("hl,lhd->hd", weights, values.repeat_interleave(repeated, 1).double())
        assert torch.allclose(out[token].double(), mixed.flatten(), atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 20), (8, 1, 80), (12, 1, 128)])
@pytest.mark.parametrize("window", [None, 5, 300])
@pytest.mark.parametrize("scattered", [False, True])
def test_tokens_of_a_long_text_have_the_bits_that_each_has_alone(
    heads: int, kv_heads: int, dim: int, window: int | None, scattered: bool
) -> None:
    """Nine tokens behind some of several segments, in one run, by any number of threads; the last one's key is NaN."""
    before, n = 700, 9
    keys, values = numbers(1, before + n, kv_heads, dim), numbers(1, before + n, kv_heads, dim) + 1
    order = torch.randperm(before + n, generator=torch.Generator().manual_seed(0))
    slots = array("q", (order if scattered else order.sort()[0]).tolist())
    keys[0, slots[-1]] = torch.nan
    q, alone, counts = numbers(n, heads, dim), torch.empty(n, heads * dim), [before + i + 1 for i in range(n)]
    torch.set_num_threads(1)
    for i, seen in enumerate(counts):
        KVSpans([(keys, values)], slots, [0], [seen]).attend(
            0, q[i : i + 1], alone[i : i + 1], range(1), 0.3, None, window
        )
    for count in (1, 3):
        torch.set_num_threads(count)
        together = torch.empty(n, heads * dim)
        KVSpans([(keys, values)], slots, [0] * n, counts).attend(0, q, together, range(n), 0.3, None, window)
        assert torch.equal(together[:-1], alone[:-1]) and together[-1].isnan().all()
    for i, seen in enumerate(counts[:-1]):
        where = list(slots)[max(0, seen - (window or seen)) : seen]
        k, v = (part[0, where].repeat_interleave(heads // kv_heads, 1).double() for part in (keys, values))
        weights = (torch.einsum("hd,lhd->hl", q[i].double(), k) * 0.3).softmax(-1)
        expected = torch.einsum("hl,lhd->hd", weights, v).flatten()
        assert torch.allclose(alone[i].double(), expected, atol=1e-5)


@pytest.mark.parametrize("texts", [[(0, 800)], [(700, 2)] * 6, [(0, 300), (500, 1), (130, 40)]], ids=str)
def test_many_tokens_have_the_bits_that_each_has_alone(texts: list[tuple[int, int]]) -> None:
    """A prompt longer than one wave, several sequences of several segments, and all kinds together."""
    heads, kv_heads, dim, total = 9, 3, 64, sum(map(sum, texts))
    keys, values = numbers(1, total, kv_heads, dim), numbers(1, total, kv_heads, dim) + 1
    slots, starts = array("q", range(total)), list(accumulate(map(sum, texts), initial=0))
    begin = [start for start, (_, n) in zip(starts, texts, strict=False) for _ in range(n)]
    counts = [before + i + 1 for before, n in texts for i in range(n)]
    q, alone = numbers(len(counts), heads, dim), torch.empty(len(counts), heads * dim)
    torch.set_num_threads(1)
    for i, (start, seen) in enumerate(zip(begin, counts, strict=True)):
        KVSpans([(keys, values)], slots, [start], [seen]).attend(0, q[i : i + 1], alone[i : i + 1], range(1), 0.3)
    for count in (1, 3):
        torch.set_num_threads(count)
        together = torch.empty(len(counts), heads * dim)
        KVSpans([(keys, values)], slots, begin, counts).attend(0, q, together, range(len(counts)), 0.3)
        assert torch.equal(together, alone)


def test_no_token_needs_no_key() -> None:
    store = numbers(1, 3, 2, 8)
    KVSpans([(store, store)], array("q"), [], []).attend(0, numbers(0, 2, 8), torch.empty(0, 16), range(0), 1.0)


def test_what_is_no_number_stays_in_its_row() -> None:
    x = numbers(3, 32)
    x[1, 4] = torch.nan
    for y in (cpu.rms_norm(x, torch.ones(32), 1e-5), cpu.silu_mul(x)):
        assert y[1].isnan().any() and y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("wrong", [torch.ones(2, 8, dtype=torch.float64), torch.ones(2, 8, dtype=torch.bfloat16)])
def test_another_type_is_refused(wrong: Tensor) -> None:
    with pytest.raises(TypeError, match="float32 on a CPU"):
        cpu.rms_norm(wrong, torch.ones(8), 1e-5)


def test_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="8 numbers, not 9"):
        cpu.rms_norm(torch.ones(2, 8), torch.ones(9), 1e-5)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_a_weight_of_16_bits_gives_the_bits_of_float32_in_half_the_bytes(kind: torch.dtype) -> None:
    weight, x = numbers(70, 33).to(kind).float(), numbers(9, 33)
    if not cpu.multiply_floats(weight):
        pytest.skip("a processor without vectors: there is no such product")
    weight[0, :4] = torch.tensor([6e-8, -6e-5, 0.0, -0.0]).to(kind).float()  # the least numbers of float16
    nudged = torch.cat((weight, numbers(1, 33)))  # its last channel has more digits, so that all are kept in float32
    short, whole = cpu.float_product(weight, None), cpu.float_product(nudged, None)
    assert torch.equal(short(x), whole(x)[:, :70])
    assert torch.equal(short.rows(torch.arange(70)), weight) and 2 * short.bytes == whole.bytes
