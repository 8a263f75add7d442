"""Keys and values in 8 bits on a CPU: what is stored, what attention makes of it, and whole runs."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ssd.config.params import Speculation
from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.kernels import cpu
from ssd.kernels.attention import KVSpans
from ssd.models.sizes import STEP_BYTES
from tests.draft.pair import PAGE_SIZE, Draft, Pair, Texts, config, params
from tests.models import tiny
from tools.activations import CACHES

pytestmark = pytest.mark.skipif(not cpu.serve(torch.empty(0)), reason="no C compiler: there are no kernels")


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def stored(x: Tensor) -> Tensor:
    """Store x [n, kv_heads, dim] as keys and as values; return the cells [n, kv_heads, dim + STEP_BYTES]."""
    n, kv_heads, dim = x.shape
    keys, values = (torch.zeros(1, n, kv_heads, dim + STEP_BYTES, dtype=torch.int8) for _ in range(2))
    KVSpans([(keys, values)], array("q", range(n)), range(n), [1] * n).put(0, x, x)
    assert torch.equal(keys, values)
    return keys[0]


def parts(cells: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes int8 [..., dim] and the steps float32 [..., 1]."""
    codes, steps = cells.split([cells.shape[-1] - STEP_BYTES, STEP_BYTES], dim=-1)
    return codes, steps.contiguous().view(torch.float32)


@pytest.mark.parametrize("dim", [1, 8, 20, 64, 80, 128])
def test_each_head_of_a_token_has_its_own_step(dim: int) -> None:
    x = numbers(9, 3, dim) * torch.logspace(-30, 30, 9)[:, None, None]
    x[4, 1] = 0.0
    codes, steps = parts(stored(x))
    largest = x.abs().amax(-1, keepdim=True)
    assert torch.equal(steps, largest / 127)
    assert torch.equal(codes.int().abs().amax(-1, keepdim=True), torch.where(largest > 0, 127, 0))
    assert (codes * steps - x).abs().le(0.5001 * steps).all()


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_a_number_that_is_none_spoils_its_head_and_no_other(odd: float) -> None:
    x = numbers(2, 2, 20)
    x[1, 0, 19] = odd
    codes, steps = parts(stored(x))
    assert (codes * steps).isnan().all(-1).tolist() == [[False, False], [True, False]]


def test_numbers_too_small_for_a_step_are_zeros() -> None:
    codes, steps = parts(stored(torch.full((1, 1, 8), 1e-42)))
    assert not codes.any() and steps.isfinite().all()


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 20), (8, 1, 80), (12, 1, 128)])
@pytest.mark.parametrize("window", [None, 5, 300])
@pytest.mark.parametrize("scattered", [False, True])
def test_attention_has_the_bits_of_the_numbers_that_the_codes_mean(
    heads: int, kv_heads: int, dim: int, window: int | None, scattered: bool
) -> None:
    """Tokens of a long text and one alone, own keys behind shared ones; by one thread and by three."""
    before, n = 700, 9
    x = numbers(before + n, kv_heads, dim)
    order = torch.randperm(before + n, generator=torch.Generator().manual_seed(0))
    slots = array("q", (order if scattered else order.sort()[0]).tolist())
    codes, steps = parts(stored(x))
    meant = (codes * steps)[None]
    coded = stored(x)[None]
    q, counts = numbers(n, heads, dim), [before + i + 1 for i in range(n)]
    for threads in (1, 3):
        torch.set_num_threads(threads)
        for rows in (1, n):
            found = [torch.empty(rows, heads * dim) for _ in range(4)]
            for store, own, out in zip((meant, coded, meant, coded), (None, None, meant, meant), found, strict=True):
                spans = KVSpans([(store, store)], slots, [0] * rows, counts[:rows])
                behind = None if own is None else KVSpans([(own, own)], slots, [3] * rows, [2] * rows)
                spans.attend(0, q[:rows], out, range(rows), 0.3, None, window, behind)
            assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])
            assert not torch.equal(found[0], found[2])


ASKED = pytest.mark.parametrize(
    "asked", [{}, {"temperature": 0.8}, {"temperature": 0.8, "repetition_penalty": 1.2}], ids=str
)


@ASKED
def test_ids_are_those_of_ar_with_the_same_cache(asked: dict[str, Any], tmp_path: Path) -> None:
    check_ids("llama", {}, asked, tmp_path)


def check_ids(kind: str, knobs: dict[str, Any], asked: dict[str, Any], folder: Path) -> None:
    """Prompts in chunks and shared ones; drafts that are right and wrong."""
    target = tiny.model(kind, folder / "target", seed=3, **knobs)
    model = tiny.runner(target).model
    draft = tiny.runner(tiny.noisy_copy(target, folder / "draft", noise=0.03))
    prompts = [tiny.token_ids(n, n) for n in (3, 50, 18)] + [tiny.token_ids(50, 50)[:30]]
    laws = params(4, 30, **asked)

    def run(mode: str) -> Texts:
        runner = Runner(model, 300, PAGE_SIZE, cache_dtype="int8")
        speculation = {
            "ar": Speculation("ar"),
            "sd": Speculation("sd", 4),
            "ssd": Speculation("ssd", 4, (3,), backup="none"),
        }[mode]
        settings = config(speculation, max_num_seqs=4, num_pages=300)
        other = Draft(settings, draft) if mode in ("sd", "ssd") else None
        return Pair(settings, runner, other).run(prompts, laws)

    alone = run("ar")
    for mode in ("sd", "ssd"):
        texts = run(mode)
        assert texts.ids == alone.ids
        assert sum(metrics.accepted_tokens for metrics in texts.metrics) > 10


def test_a_model_reads_what_was_rounded(tmp_path: Path) -> None:
    model, ids = tiny.runner(tiny.llama(tmp_path)).model, tiny.token_ids(26, 1)
    found = [Runner(model, 9, PAGE_SIZE, cache_dtype=cache).forward([Row(ids, 0, range(9), 26)]) for cache in CACHES]
    assert 1e-5 < (found[0] - found[1]).norm() / found[0].norm() < 0.05


def test_a_model_that_our_kernels_do_not_serve_is_refused(tmp_path: Path) -> None:
    model = tiny.runner(tiny.llama(tmp_path), torch.bfloat16).model
    with pytest.raises(UsageError, match="a KV cache in int8 needs our kernels"):
        Runner(model, 4, PAGE_SIZE, cache_dtype="int8")
