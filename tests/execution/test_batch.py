"""Attention of a ragged batch over pages, against one row at a time."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from ssd.execution.batch import Row
from ssd.execution.kv_cache import KVCache
from ssd.execution.paged import PagedContext
from ssd.layers.attention import PLAIN, Scores, attend
from ssd.models.interface import Shape
from tests.pairs import pairwise

pytestmark = pytest.mark.usefixtures("either_way")

SHAPE = Shape(vocab_size=8, outputs=8, layers=1, heads=6, kv_heads=2, head_dim=8, max_position=64)
PAGE = 4


def numbers(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    ("singles", "longer", "dtype", "deterministic", "rule"),
    pairwise(
        [1, 15, 16, 40],
        [(), (3, 9), (9, 40)],
        [torch.float32, torch.float64],
        [False, True],
        [PLAIN, Scores(0.5, 7, 0.8), Scores(window=1), Scores(softcap=0.8), Scores(window=7, sinks=torch.arange(6.0))],
    ),
    ids=str,
)
def test_a_row_attends_to_its_own_sequence_whatever_the_batch(
    singles: int, longer: tuple[int, ...], dtype: torch.dtype, deterministic: bool, rule: Scores
) -> None:
    """Rows of one token among longer ones, pages in any order; slots that were never written hold NaN. Our kernels
    take float32 alone."""
    dice, generator = Random(1), torch.Generator().manual_seed(2)
    lengths = [1] * singles + list(longer)
    dice.shuffle(lengths)
    starts = [dice.randrange(30) for _ in lengths]
    cache = KVCache(SHAPE, 18 * len(lengths), PAGE, dtype, torch.device("cpu"))
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    free = list(range(cache.pages))
    dice.shuffle(free)
    pages = [
        [free.pop() for _ in range(-(-(start + length) // PAGE))] for start, length in zip(starts, lengths, strict=True)
    ]
    rows = [Row([0] * length, start, own) for length, start, own in zip(lengths, starts, pages, strict=True)]
    texts = [tuple(numbers(generator, row.stop, 2, 8).to(dtype) for _ in range(2)) for row in rows]
    queries = [numbers(generator, length, 6, 8).to(dtype) for length in lengths]
    for row, (keys, values) in zip(rows, texts, strict=True):
        before = torch.tensor(cache.slots(row.pages, 0, row.start), dtype=torch.long)
        cache.write(0, before, keys[: row.start], values[: row.start])
    context = PagedContext(rows, cache, deterministic)
    new = [torch.cat([text[kind][row.start :] for row, text in zip(rows, texts, strict=True)]) for kind in range(2)]
    got = context.attend(0, torch.cat(queries), *new, rule)
    expected = torch.cat(
        [attend(q, *text, rule.scale or 8**-0.5, rule) for q, text in zip(queries, texts, strict=True)]
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5)
