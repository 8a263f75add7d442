"""Attention over pages by every backend that a CPU can run, against the attention of each row by itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from ssd.errors import UsageError
from ssd.execution.runner import attention_backend
from ssd.layers.attention import PLAIN, Scores, attend, attend_part, very_low
from ssd.layers.paged import PagedAttention, PagedKeys, PagedRows, TorchAttention
from ssd.layers.triton_attention import TritonAttention
from tests.layers.paged_case import Case, case

CPU = torch.device("cpu")
BACKENDS: dict[str, PagedAttention] = {
    "torch": TorchAttention(),
    "triton": TritonAttention(CPU),
    "triton, keys shared out": TritonAttention(CPU, processors=40),
    "triton, deterministic": TritonAttention(CPU, deterministic=True),
}


def turns(*values: Any) -> list[tuple[str, Any]]:
    """Backends with values: torch and Triton with all of them, Triton's two variants by turns."""
    plain, variants = list(BACKENDS)[:2], list(BACKENDS)[2:]
    return [(name, value) for name in plain for value in values] + [
        (variants[index % 2], value) for index, value in enumerate(values)
    ]


TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def check(backend: str, given: Case, rule: Scores = PLAIN) -> None:
    scale = 0.3
    got = BACKENDS[backend].attend(given.q, given.keys, given.values, given.rows, scale, rule)
    expected = given.expected(scale, rule)
    assert got.dtype == given.q.dtype
    assert (got.double() - expected).abs().max() <= TOLERANCE[got.dtype] * max(1.0, expected.abs().max().item())


MIXED = ((1, 1), (1, 40), (5, 5), (8, 30), (16, 33), (1, 17))


@pytest.mark.parametrize(("backend", "heads"), turns((1, 1), (4, 4), (4, 2), (9, 3), (7, 1)), ids=str)
def test_rows_of_any_length_over_shared_key_heads(backend: str, heads: tuple[int, int]) -> None:
    check(backend, case(MIXED, heads))


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_queries_share_a_key_head_than_a_program_has_at_least(backend: str) -> None:
    check(backend, case(((2, 9), (1, 20)), (40, 2)))


@pytest.mark.parametrize(
    ("backend", "sizes"),
    turns((1, 17), (1, 300), (3, 15), (3, 300), (16, 15), (16, 16), (16, 17), (64, 16), (64, 300)),
    ids=str,
)
def test_pages_of_any_size(backend: str, sizes: tuple[int, int]) -> None:
    page, length = sizes
    check(backend, case(((3, length), (1, 64)), page=page))


@pytest.mark.parametrize(("backend", "rule"), turns(*(Scores(window=w) for w in (1, 4, 32, 100))), ids=str)
def test_a_window_hides_what_lies_before_it(backend: str, rule: Scores) -> None:
    check(backend, case(((1, 90), (7, 90), (5, 5), (16, 40), (2, 129)), dim=8), rule)


@pytest.mark.parametrize(("backend", "rule"), turns(Scores(softcap=0.7), Scores(window=9, softcap=30.0)), ids=str)
def test_a_soft_cap(backend: str, rule: Scores) -> None:
    check(backend, case(MIXED), rule)


SINKS = torch.tensor([-1.0, 0.5, 2.0, 9.0])


@pytest.mark.parametrize(("backend", "rule"), turns(Scores(sinks=SINKS), Scores(None, 9, 3.0, SINKS)), ids=str)
def test_sinks(backend: str, rule: Scores) -> None:
    check(backend, case(MIXED), rule)


@pytest.mark.parametrize(
    ("backend", "kind"),
    turns((torch.float32, 24), (torch.bfloat16, 24), (torch.float16, 64), (torch.float32, 160), (torch.bfloat16, 160)),
    ids=str,
)
def test_types_and_widths_of_heads(backend: str, kind: tuple[torch.dtype, int]) -> None:
    dtype, dim = kind
    check(backend, case(((4, 70), (1, 130)), (6, 2), dim, dtype=dtype))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_longer_than_a_program(backend: str) -> None:
    """A chunk of a prompt beside rows that decode."""
    check(backend, case(((50, 60), (1, 9), (70, 70)), (6, 2)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_queries_change_nothing(backend: str) -> None:
    given = case(((0, 8), (3, 20), (0, 4), (1, 7), (0, 9)))
    check(backend, given)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, 6])
def test_a_part_sees_what_it_is_told_and_knows_its_sum(backend: str, window: int | None) -> None:
    """As branches do: each sees a number of keys of its own and stands somewhere beyond, perhaps beyond its window."""
    given = case(((7, 20), (3, 33)), (6, 2))
    q, k, v = given.texts[0]
    seen = torch.tensor([14, 20, 13, 20, 17, 15, 20, 33, 32, 33])
    positions = torch.tensor([14, 24, 15, 20, 40, 16, 21, 34, 33, 60])
    rows = PagedRows(given.rows.table, given.rows.sequences, given.rows.starts, seen, positions, 4, 7, causal=False)
    rule = Scores(window=window)
    out, total = BACKENDS[backend].part(given.q, given.keys, given.values, rows, 0.3, rule)
    start = 0
    for q, k, v in given.texts:
        mine = slice(start, start + len(q))
        places = torch.arange(len(k))
        hidden = places >= seen[mine, None]
        if window is not None:
            hidden |= places <= positions[mine, None] - window
        expected, sums = attend_part(q, k, v, 0.3, very_low(hidden, torch.float32)[:, None], rule)
        blind = hidden.all(-1)
        assert (out[mine] - expected)[~blind].abs().max() <= 2e-6
        assert (total[mine] - sums)[~blind].abs().max() <= 1e-5
        assert (total[mine][blind] < -1e30).all() and out[mine].isfinite().all()
        start += len(q)


@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 4, 6)], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_sets_of_keys_in_one_softmax(backend: str, dtype: torch.dtype, sinks: Tensor | None) -> None:
    """As a tree's tokens do: those of a row share a path, and each has a cell of its own, perhaps an empty one."""
    rule = Scores(sinks=sinks)
    given, depth, counts = case(((7, 20), (3, 333)), (6, 2), dtype=dtype), 5, [0, 1, 5, 3, 5, 0, 2, 4, 0, 5]
    cells = [9, 4, 0, 1, 2, 3, 5, 6, 7, 8]
    own = case([(1, 10 * depth)], (6, 2), page=10 * depth, dtype=dtype).texts[0][1:]
    rows = PagedRows(
        torch.arange(10, dtype=torch.int32)[:, None],
        torch.tensor(cells, dtype=torch.int32),
        torch.arange(11, dtype=torch.int32),
        torch.tensor(counts),
        torch.tensor(counts) - 1,
        depth,
        1,
        causal=False,
    )
    paths = PagedKeys(given.keys, given.values, given.rows)
    got = BACKENDS[backend].attend_both(given.q, paths, PagedKeys(*own, rows), 0.3, rule)
    expected = []
    for q, *path in given.texts:
        for index in range(len(q)):
            place, seen = depth * cells[len(expected)], len(path[0]) - len(q) + 1 + index
            mine = slice(place, place + counts[len(expected)])
            both = (torch.cat((of[:seen], more[mine])).double() for of, more in zip(path, own, strict=True))
            expected.append(attend(q[index : index + 1].double(), *both, 0.3, rule))
    assert got.dtype == dtype
    assert (got - torch.cat(expected)).abs().max() <= TOLERANCE[dtype]


@pytest.mark.usefixtures("products_of_rows")
@pytest.mark.parametrize("window", [None, 20])
def test_a_deterministic_result_does_not_depend_on_the_batch(window: int | None) -> None:
    """The same query alone, in a longer row, and beside others."""
    backend, rule = BACKENDS["triton, deterministic"], Scores(window=window)
    given = case(((5, 300), (1, 20), (16, 90)))
    rows, arguments = given.rows, (given.keys, given.values)
    together = backend.attend(given.q, *arguments, rows, 0.3, rule)
    for query in (0, 3, 4):
        alone = PagedRows(
            rows.table,
            rows.sequences[:1],
            torch.tensor([0, 1], dtype=torch.int32),
            rows.seen[query : query + 1],
            rows.positions[query : query + 1],
            4,
            1,
        )
        got = backend.attend(given.q[query : query + 1], *arguments, alone, 0.3, rule)
        assert torch.equal(got[0], together[query])


def test_queries_may_lie_between_other_numbers() -> None:
    """As they do beside the keys of one projection."""
    given = case(MIXED)
    wide = torch.full((given.q.shape[0], 9, 16), torch.nan)
    wide[:, 2:6] = given.q
    check("triton", given._replace(q=wide[:, 2:6]))


class FlashAttn(ModuleType):
    """The package as it is documented (flash-attn 2.8): what its function takes, and what it returns for that."""

    def __init__(self) -> None:
        super().__init__("flash_attn")
        self.called = 0

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        """Of each sequence the last query sees the last key, and those before it one key less each."""
        self.called += 1
        assert block_table is not None and softmax_scale is not None
        assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == block_table.dtype == torch.int32
        assert cu_seqlens_q.is_contiguous() and cu_seqlens_k.is_contiguous() and block_table.stride(-1) == 1
        assert len(cu_seqlens_q) == len(cu_seqlens_k) == len(block_table) + 1
        assert cu_seqlens_q[0] == cu_seqlens_k[0] == 0 and cu_seqlens_q[-1] == len(q)
        assert type(max_seqlen_q) is type(max_seqlen_k) is int
        assert max_seqlen_q >= cu_seqlens_q.diff().max() and max_seqlen_k >= cu_seqlens_k.diff().max()
        assert block_table.shape[1] * k.shape[1] >= max_seqlen_k and k.shape == v.shape and k.shape[1] % 256 == 0
        assert k.stride(-1) == v.stride(-1) == q.stride(-1) == 1 and q.shape[1] % k.shape[2] == 0
        assert q.shape[2] == k.shape[3] <= 256 and q.shape[2] % 8 == 0
        left, right = window_size
        assert causal and right == (-1 if left < 0 else 0)
        assert (dropout_p, alibi_slopes, deterministic, return_attn_probs) == (0.0, None, False, False)
        rule, out = Scores(window=None if left < 0 else left + 1, softcap=softcap or None), torch.empty_like(q)
        for pages, queries, seen in zip(
            block_table, pairwise(cu_seqlens_q.tolist()), cu_seqlens_k.diff().tolist(), strict=True
        ):
            mine = pages[: -(-seen // k.shape[1])].long()
            keys, values = (kind[mine].flatten(0, 1)[:seen].double() for kind in (k, v))
            own = slice(*queries)
            if seen:
                out[own] = attend(q[own].double(), keys, values, softmax_scale, rule).view_as(q[own]).to(q.dtype)
        return out


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> Iterator[FlashAttn]:
    package = FlashAttn()
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    yield package
    sys.modules.pop("ssd.layers.flash_attention")


@pytest.mark.parametrize("rule", [PLAIN, Scores(window=30), Scores(softcap=4.0)], ids=str)
def test_prompts_go_through_flash_attn_as_it_is_documented(rule: Scores, flash_attn: FlashAttn) -> None:
    backend = attention_backend("flash-attn", CPU, 256)
    for lengths, calls in (([(40, 300), (1, 257), (0, 0), (3, 3)], 1), ([(16, 300), (1, 20)], 0)):
        given = case(lengths, dim=16, page=256, dtype=torch.float16)
        found = backend.attend(given.q, given.keys, given.values, given.rows, 0.3, rule)
        assert (found.double() - given.expected(0.3, rule)).abs().max() < 4e-3
        assert flash_attn.called == calls
        flash_attn.called = 0
    wide = case([(40, 300)], dim=16, page=256)  # in 32 bits
    backend.attend(wide.q, wide.keys, wide.values, wide.rows, 0.3, rule)
    assert flash_attn.called == 0
    given, rule = case([(40, 300)], page=256, dtype=torch.float16), Scores(sinks=SINKS)
    found = backend.attend(given.q, given.keys, given.values, given.rows, 0.3, rule)
    assert (found.double() - given.expected(0.3, rule)).abs().max() < 4e-3 and flash_attn.called == 0
    with pytest.raises(UsageError, match="needs pages of 256 tokens, not of 16"):
        attention_backend("flash-attn", CPU, 16)
    with pytest.raises(UsageError, match="cannot be --deterministic"):
        attention_backend("flash-attn", CPU, 256, deterministic=True)


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(UsageError, match="flash-attn is not installed"):
        attention_backend("flash-attn", CPU, 256)
    assert isinstance(attention_backend("auto", CPU, 16), TorchAttention)


def test_triton_needs_a_gpu_or_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(attention_backend("triton", CPU, 16), TritonAttention)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(UsageError, match="works on a GPU"):
        attention_backend("triton", CPU, 16)
