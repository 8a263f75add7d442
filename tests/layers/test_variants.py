"""Which variants of our attention kernels Triton would compile: those of the warm-up, whatever batches come later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, create_function_from_signature

from ssd.config.params import Speculation
from ssd.draft.chain_cache import ChainTokens
from ssd.draft.drafter import ChainRows, PathRow
from ssd.draft.static_shapes import TreeRunner
from ssd.execution.batch import Row
from ssd.execution.static import StaticRunner
from ssd.law import Law
from ssd.layers.triton_attention import TritonAttention
from ssd.models.families.llama import Llama
from ssd.models.weights import Weights
from ssd.speculation.sampling import Drawing
from tests.draft.pair import config
from tests.verifier.scripted import CONFIG

CPU, PAGE, SEQUENCES, LENGTH, PAGES = torch.device("cpu"), 4, 16, 100, 512


def model(dtype: torch.dtype) -> Llama:
    def read(name: str, shape: tuple[int, ...], piece: object = None) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    return Llama(CONFIG, Weights(read), dtype, CPU, PAGES * PAGE)


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The keys of all launched kernels in Triton's cache of an H100. Nothing is computed."""
    found, binders, backend = set[str](), dict[Any, Any](), make_backend(GPUTarget("cuda", 90, 32))

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if self not in binders:
            names = "do_not_specialize", "do_not_specialize_on_alignment"
            kernel: Any = JITFunction(self.fn, **{name: self.kwargs[name] for name in names})
            binders[self] = create_function_from_signature(kernel.signature, kernel.params, backend)
        _, specialization, options = binders[self](*args, **kwargs)
        found.add(f"{self.fn.__name__} {specialization} {options}")

    monkeypatch.setattr(InterpretedFunction, "run", run)
    return found


def batches(seed: int) -> list[list[Row]]:
    """Prompts beside rows that decode: of every length alone, and any mix of up to 16."""
    dice = Random(seed)
    counts: list[tuple[int, ...]] = [(length,) for length in range(1, LENGTH + 1)]
    for rows in range(2, SEQUENCES + 1):
        counts += [(1,) * rows, (LENGTH, *(1,) * (rows - 1)), tuple(dice.randint(1, LENGTH) for _ in range(rows))]
    pages = [range(PAGES * slot, PAGES * (slot + 1)) for slot in range(SEQUENCES)]
    starts = [dice.randint(0, 1500) for _ in pages]
    return [[Row([0] * n, starts[slot], pages[slot], 1, slot) for slot, n in enumerate(own)] for own in counts]


def kernels(variants: set[str]) -> Counter[str]:
    return Counter(variant.partition(" ")[0] for variant in variants)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_no_batch_of_a_target_needs_a_variant_after_the_warm_up(
    variants: set[str], dtype: torch.dtype, deterministic: bool
) -> None:
    runner = StaticRunner(model(dtype), PAGES * SEQUENCES, PAGE, deterministic, most_rows=SEQUENCES, longest=6)
    runner.attention = TritonAttention(CPU, deterministic, processors=132)
    runner.warm_up(6)
    known = set(variants)
    assert kernels(known) == {"attend_kernel": 2 if deterministic or dtype == torch.float32 else 6, "merge_kernel": 1}
    for rows in batches(1):
        runner.forward(rows)
    assert variants == known


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_no_step_of_a_draft_needs_a_variant_after_the_warm_up(variants: set[str], dtype: torch.dtype) -> None:
    """Prompts of any length, paths, and chains beside them."""
    sizes = {"max_num_seqs": SEQUENCES, "draft_num_pages": PAGES * SEQUENCES, "page_size": PAGE}
    runner = TreeRunner(model(dtype), config(Speculation("ssd", 4, (3,), "jit"), **sizes))
    runner.attention = TritonAttention(CPU, processors=132)
    runner.warm_up(16)
    known = set(variants)
    # The cells of chains are pages of another size, and of one query each.
    assert kernels(known) == {"attend_kernel": 1 + (1 if dtype == torch.float32 else 2), "merge_kernel": 1}
    for rows in batches(2):
        trees: Any = [SimpleNamespace(slot=row.slot, law=Law()) for row in rows]
        for chains in ([], chains_of(rows)):
            paths = [PathRow(tree, row) for tree, row in zip(trees, rows, strict=True)]
            own = [ChainRows(tree, tokens) for tree, tokens in zip(trees[::2], chains, strict=False)]
            for batch, shape in runner.batches(runner.rows(paths, own)):
                runner._run(batch, shape, Drawing.GREEDY)
    assert variants == known


def chains_of(rows: Sequence[Row]) -> list[ChainTokens]:
    """Up to three chains of different depth a row."""
    found = []
    for row in rows[::2]:
        own = ChainTokens(row.pages, row.stop)
        for depth in range(1 + row.slot % 3):
            own.add(0, 3 * row.slot + depth, depth, [0] * (1 + depth))
        found.append(own)
    return found
