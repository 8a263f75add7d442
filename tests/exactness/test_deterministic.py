"""`deterministic`: the logits of a token are the same bits however its row, its batch and its pages look (C2)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ssd.config.params import MAX_LOOKAHEAD
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.kernels import cpu
from ssd.models.hub import resolve
from tests.models import tiny

PAGE = 16
LONGEST = 150
PAGES = -(-LONGEST // PAGE)
TOTAL = 4 * PAGES
NEIGHBOURS = list(range(PAGES))
SCATTERED = [(7 * index + 3) % TOTAL for index in range(PAGES)]
# Around page borders, and far from them.
CONTEXTS = (1, 3, 11, 15, 16, 17, 31, 32, 33, 47, 64, 100, 130)


class Decoded:
    """A text decoded one token at a time: its runner and the logits of every position."""

    def __init__(self, directory: Path, int8: bool, deterministic: bool = True) -> None:
        self.runner = tiny.runner(directory, pages=TOTAL, page_size=PAGE, deterministic=deterministic, int8=int8)
        self.text = tiny.token_ids(LONGEST, 5)
        self.logits = torch.cat([self.row(position, 1, NEIGHBOURS) for position in range(LONGEST)])

    def row(self, start: int, count: int, pages: Sequence[int]) -> Tensor:
        """Logits [count, V] of a row of the text; what is before it must have been computed in `pages`."""
        return self.runner.forward([Row(self.text[start : start + count], start, pages, count)])

    def prefill(self, length: int, pages: Sequence[int]) -> None:
        """As one row without outputs."""
        self.runner.forward([Row(self.text[:length], 0, pages, outputs=0)])


@pytest.fixture(scope="module", params=["llama", "qwen3", "odd", "smollm2", "odd int8", "smollm2 int8"])
def decoded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoded:
    folder = tmp_path_factory.mktemp("model")
    name, *quantized = request.param.split()
    if name == "llama":
        tiny.llama(folder)
    elif name == "qwen3":
        tiny.qwen3(folder)
    elif name == "odd":
        tiny.llama(folder, hidden_size=54, num_attention_heads=3, num_key_value_heads=1, intermediate_size=1101)
    else:
        folder = resolve(name)
    return Decoded(folder, int8=bool(quantized))


@pytest.mark.parametrize(
    ("drafted", "pages"), [(1, SCATTERED), (4, NEIGHBOURS), (8, SCATTERED)], ids=["1", "4 in neighbours", "8"]
)
def test_a_verification_is_the_same_computation_as_decoding(decoded: Decoded, drafted: int, pages: list[int]) -> None:
    for context in CONTEXTS:
        decoded.prefill(context, pages)
        logits = decoded.row(context, 1 + drafted, pages)
        assert torch.equal(logits, decoded.logits[context : context + 1 + drafted]), context


@pytest.mark.parametrize("pages", [NEIGHBOURS, SCATTERED], ids=["neighbours", "scattered"])
def test_so_is_prefill(decoded: Decoded, pages: list[int]) -> None:
    assert torch.equal(decoded.row(0, LONGEST, pages), decoded.logits)


def test_rejected_tokens_leave_no_trace(decoded: Decoded) -> None:
    """A row of the right token and four wrong ones, then the right ones in their place."""
    for context in CONTEXTS:
        decoded.prefill(context, SCATTERED)
        wrong = [decoded.text[context], 1, 2, 3, 4]
        logits = decoded.runner.forward([Row(wrong, context, SCATTERED, 5)])
        assert torch.equal(logits[0], decoded.logits[context])
        assert torch.equal(decoded.row(context + 1, 4, SCATTERED), decoded.logits[context + 1 : context + 5])


def test_company_changes_nothing(decoded: Decoded) -> None:
    """The same verification in a batch with a prefill, a decode and another verification, before and behind it."""
    runner: Runner = decoded.runner
    tables = [list(range(start, TOTAL, 4)) for start in range(4)]
    for context in CONTEXTS:
        decoded.prefill(context, tables[0])
        decoded.prefill(40, tables[1])
        decoded.prefill(9, tables[2])
        mine = Row(decoded.text[context : context + 5], context, tables[0], 5)
        others = [
            Row(tiny.token_ids(5, 1), 40, tables[1], 5),
            Row([7], 9, tables[2], 1),
            Row(tiny.token_ids(37, 2), 0, tables[3], 0),
        ]
        expected = decoded.logits[context : context + 5]
        assert torch.equal(runner.forward([mine, *others])[:5], expected), context
        assert torch.equal(runner.forward([*others, mine])[-5:], expected), context


KERNELS = pytest.mark.skipif(
    not cpu.serve(torch.empty(0)), reason="no C compiler: without our kernels it takes the flag"
)


@KERNELS
@pytest.mark.parametrize("name", ["qwen3", "smollm2", "smollm2 int8"])
def test_by_our_kernels_all_rows_are_those_of_decoding_without_the_flag(name: str, tmp_path: Path) -> None:
    name, *quantized = name.split()
    check_without_flag(resolve(name) if name == "smollm2" else tiny.qwen3(tmp_path), bool(quantized))


def check_without_flag(folder: Path, int8: bool = False) -> None:
    """What was decoded before is in the cache; rows are as long as verifications get, and as a whole prompt."""
    decoded = Decoded(folder, int8, deterministic=False)
    for context in CONTEXTS:
        for count in (2, 5, 1 + MAX_LOOKAHEAD):
            logits = decoded.row(context, count, NEIGHBOURS)
            assert torch.equal(logits, decoded.logits[context : context + count]), context
    assert torch.equal(decoded.row(0, LONGEST, SCATTERED), decoded.logits)
