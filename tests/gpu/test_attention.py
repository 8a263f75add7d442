"""Attention over pages on a GPU, against the same in double precision on the CPU."""

from __future__ import annotations

from importlib.util import find_spec
from random import Random

import pytest
import torch

from ssd.errors import UsageError
from ssd.execution.runner import attention_backend
from ssd.layers.attention import PLAIN, Scores
from ssd.layers.paged import PagedAttention, PagedKeys, PagedRows, TorchAttention
from ssd.layers.triton_attention import TritonAttention
from tests.layers.paged_case import Case, case

GPU = torch.device("cuda")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
ROWS = (((1, 1),), ((8, 1000),), ((1, 5), (8, 130), (16, 64), (3, 2000)), ((1, 700),) * 40, ((300, 900), (8, 33)))


def on_gpu(given: Case) -> tuple[PagedRows, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    rows = given.rows
    moved = (each.to(GPU) for each in (rows.table, rows.sequences, rows.starts, rows.seen, rows.positions))
    return (
        PagedRows(*moved, rows.page_size, rows.longest, rows.causal),
        (given.q.to(GPU), given.keys.to(GPU), given.values.to(GPU)),
    )


def check(backend: PagedAttention, given: Case, rule: Scores) -> None:
    """Twice, the second time into memory that held something else; NaN is not near to anything."""
    rows, tensors = on_gpu(given)
    expected = given.expected(0.3, rule)
    for _ in range(2):
        got = backend.attend(*tensors, rows, 0.3, rule).double().cpu()
        torch.full((64, 1 << 20), torch.nan, device=GPU)
        error = (got - expected).norm() / expected.norm()
        assert error <= TOLERANCE[given.q.dtype], error


@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: f"{len(rows)}x{max(rows)}")
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    "heads", [(32, 8, 128), (9, 3, 64), (14, 2, 64), (40, 8, 128), (8, 1, 256), (6, 6, 80)], ids=str
)
def test_triton_is_right(rows: tuple[tuple[int, int], ...], dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    for deterministic in (False, True):
        check(TritonAttention(GPU, deterministic), case(rows, heads[:2], heads[2], 16, dtype), PLAIN)


@pytest.mark.parametrize("page", [1, 16, 48, 256])
@pytest.mark.parametrize(
    "rule", [Scores(window=1), Scores(window=100), Scores(softcap=5.0), Scores(window=37, softcap=30.0)], ids=str
)
def test_triton_with_windows_caps_and_pages(page: int, rule: Scores) -> None:
    check(TritonAttention(GPU), case(ROWS[2], (8, 2), 64, page, torch.bfloat16), rule)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("window", [None, 100])
def test_triton_beside_sinks(dtype: torch.dtype, window: int | None) -> None:
    """Also where a softmax is computed in parts: a sink counts once."""
    sinks = torch.linspace(-3.0, 6.0, 8)
    for deterministic in (False, True):
        given, backend = case(ROWS[2], (8, 2), 64, 16, dtype), TritonAttention(GPU, deterministic)
        rows, tensors = on_gpu(given)
        expected = given.expected(0.3, Scores(window=window, sinks=sinks))
        got = backend.attend(*tensors, rows, 0.3, Scores(window=window, sinks=sinks.to(GPU))).double().cpu()
        assert (got - expected).norm() / expected.norm() <= TOLERANCE[dtype]


def test_parts_are_those_of_torch() -> None:
    """Chain tokens: how far each sees, and its sum, also where a window hides everything."""
    given, dice = case(((40, 300), (7, 33), (64, 1000)), (8, 2), 64, 16, torch.float32), Random(1)
    lengths = [length for queries, length in ((40, 300), (7, 33), (64, 1000)) for _ in range(queries)]
    seen = torch.tensor([length - dice.randrange(8) for length in lengths])
    positions = seen + torch.tensor([dice.choice((0, 3, 200)) for _ in lengths])
    rows, tensors = on_gpu(given)
    parts = PagedRows(rows.table, rows.sequences, rows.starts, seen.to(GPU), positions.to(GPU), 16, 64, causal=False)
    for rule in (PLAIN, Scores(window=50)):
        out, total = TritonAttention(GPU).part(*tensors, parts, 0.3, rule)
        expected, sums = TorchAttention().part(*tensors, parts, 0.3, rule)
        sees = sums > -1e30
        assert (out - expected)[sees].abs().max() <= 1e-4 and (total - sums)[sees].abs().max() <= 1e-4
        assert (total[~sees] < -1e30).all() and out.isfinite().all()


def test_two_sets_of_keys_are_merged_as_by_torch() -> None:
    """A path for each row, and a cell for each query."""
    given, queries, depth = case(((8, 300), (16, 33), (16, 4000)), (8, 2), 64, 16, torch.float32), 40, 17
    rows, (q, *cache) = on_gpu(given)
    own = torch.arange(queries, device=GPU) % (depth + 1)
    numbers = torch.arange(queries + 1, dtype=torch.int32, device=GPU)
    cells = PagedRows(numbers[:queries, None], numbers[:queries], numbers, own, own - 1, depth, 1, causal=False)
    sets = PagedKeys(*cache, rows), PagedKeys(*torch.randn(2, queries * depth, 2, 64, device=GPU), cells)
    expected = TorchAttention().attend_both(q, *sets, 0.3, PLAIN)
    sunk = Scores(sinks=torch.linspace(-3.0, 6.0, 8, device=GPU))
    beside = TorchAttention().attend_both(q, *sets, 0.3, sunk)
    for deterministic in (False, True):
        backend = TritonAttention(GPU, deterministic)
        assert (backend.attend_both(q, *sets, 0.3, PLAIN) - expected).abs().max() <= 1e-4
        assert (backend.attend_both(q, *sets, 0.3, sunk) - beside).abs().max() <= 1e-4


def test_a_deterministic_result_has_the_same_bits_in_any_batch() -> None:
    backend = TritonAttention(GPU, deterministic=True)
    given = case(((8, 3000), (1, 20), (16, 900)), (32, 8), 128, 16, torch.bfloat16)
    rows, (q, keys, values) = on_gpu(given)
    together = backend.attend(q, keys, values, rows, 0.1, PLAIN)
    for query in range(8):
        alone = PagedRows(
            rows.table,
            rows.sequences[:1],
            torch.tensor([0, 1], dtype=torch.int32, device=GPU),
            rows.seen[query : query + 1],
            rows.positions[query : query + 1],
            16,
            1,
        )
        assert torch.equal(backend.attend(q[query : query + 1], keys, values, alone, 0.1, PLAIN)[0], together[query])


@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: f"{len(rows)}x{max(rows)}")
@pytest.mark.parametrize("rule", [PLAIN, Scores(window=100), Scores(softcap=5.0)], ids=str)
def test_flash_attn_is_right(rows: tuple[tuple[int, int], ...], rule: Scores) -> None:
    if find_spec("flash_attn") is None:  # then it is refused, and nothing is known of it
        with pytest.raises(UsageError, match="not installed"):
            attention_backend("flash-attn", GPU, 256)
        return
    from ssd.layers.flash_attention import PAGE_SIZE, FlashAttention

    check(FlashAttention(GPU, PAGE_SIZE, False), case(rows, (32, 8), 128, PAGE_SIZE, torch.bfloat16), rule)
