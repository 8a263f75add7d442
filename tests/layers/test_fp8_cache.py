"""Keys and values in FP8: how they are rounded and read, by torch and by Triton's interpreter; and whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ssd.config.params import Speculation
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.execution.static import StaticRunner
from ssd.layers.attention import Scores
from ssd.layers.paged import PagedAttention, PagedRows, TorchAttention, of_cache, to_fp8
from ssd.layers.triton_attention import TritonAttention
from ssd.layers.triton_fused import turn
from tests.draft.pair import PAGE_SIZE, Draft, Pair, Texts, config, params
from tests.layers.paged_case import case
from tests.models import tiny

CPU = torch.device("cpu")
CODES = torch.arange(256, dtype=torch.uint8)
BACKENDS = {"torch": TorchAttention(), "triton": TritonAttention(CPU, processors=8)}


def numbers() -> Tensor:
    """All that FP8 has, what lies between two of them, and next to that; what is too large, and no numbers."""
    found = of_cache(CODES, torch.float32)
    found = found[found.isfinite()].sort().values
    ties = (found[1:] + found[:-1]) / 2
    near = [torch.nextafter(ties, torch.full_like(ties, end)) for end in (-torch.inf, torch.inf)]
    beyond = torch.tensor([448.1, 463.9, 464.0, 1e30, torch.inf, torch.nan])
    return torch.cat((found, ties, *near, beyond, -beyond))


def test_a_kernel_rounds_as_torch_does() -> None:
    """Where keys and values are stored; keys are turned by nothing here."""
    dim = 64
    given = torch.nn.functional.pad(numbers(), (0, -len(numbers()) % dim)).view(-1, 1, dim)
    count = len(given)
    table = torch.ones(count, 1, dim), torch.zeros(count, 1, dim)
    keys, values = (torch.zeros(count, 1, dim, dtype=torch.uint8) for _ in range(2))
    turnable = torch.where(given.isfinite() & (given != 0), given, 1.0)
    projected = torch.cat((given, turnable, given), dim=1)
    turn(projected, 1, table, None, 0.0, keys, values, torch.arange(count).flip(0))
    nan = given.isnan()
    assert torch.equal(keys.flip(0), to_fp8(turnable))
    assert torch.equal(values.flip(0)[~nan], to_fp8(given)[~nan])
    assert of_cache(values.flip(0), torch.float32)[nan].isnan().all()
    assert to_fp8(torch.tensor([1e30, -torch.inf])).tolist() == [0x7E, 0xFE]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_code_is_read_as_it_is(backend: str, dtype: torch.dtype) -> None:
    """Each query sees one key, so its result is that value."""
    steps, ones = torch.arange(17, dtype=torch.int32), torch.ones(16, dtype=torch.int32)
    rows = PagedRows(steps[:-1, None], steps[:-1], steps, ones, ones - 1, 1, 1)
    keys, values, q = (
        torch.zeros(16, 1, 16, dtype=torch.uint8),
        CODES.view(16, 1, 16),
        torch.ones(16, 1, 16, dtype=dtype),
    )
    found = BACKENDS[backend].attend(q, keys, values, rows, 1.0, Scores())
    assert torch.equal(found.nan_to_num(7.0), of_cache(values, dtype).flatten(1).nan_to_num(7.0))


@pytest.mark.parametrize("rule", [Scores(), Scores(window=9, softcap=30.0)], ids=["plain", "window and cap"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_over_pages_of_fp8(backend: str, rule: Scores) -> None:
    given = case(((1, 1), (1, 40), (5, 5), (8, 30), (16, 33)), (4, 2))
    texts = [(q, *(of_cache(to_fp8(part), q.dtype) for part in (k, v))) for q, k, v in given.texts]
    attention: PagedAttention = BACKENDS[backend]
    found = attention.attend(given.q, to_fp8(given.keys), to_fp8(given.values), given.rows, 0.3, rule)
    expected = given._replace(texts=texts).expected(0.3, rule)
    assert (found.double() - expected).abs().max() <= 2e-6 * max(1.0, float(expected.abs().max()))


@pytest.mark.usefixtures("replayed")
def test_a_model_says_the_same_by_the_kernels_and_by_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms, turns and FP8 in one kernel; a prompt without static shape, then a verification in one."""
    model, ids = tiny.runner(tiny.qwen3(tmp_path)).model, tiny.token_ids(26, 1)
    found = []
    for attention in ("torch", "triton"):
        if attention == "triton":
            for module in ("models.families.llama", "layers.norm"):
                monkeypatch.setattr(f"ssd.{module}.fuses", lambda device: True)
        runner = StaticRunner(model, 40, PAGE_SIZE, attention=attention, most_rows=2, longest=6, cache_dtype="fp8")
        parts = [
            runner.forward([Row(ids[start:stop], start, range(9), stop - start)]).clone()
            for start, stop in ((0, 20), (20, 26))
        ]
        assert runner.cache.keys.dtype == torch.uint8
        found.append(torch.cat(parts))
    wide = Runner(model, 40, PAGE_SIZE).forward([Row(ids, 0, range(9), 26)])
    # A key next to the middle of two codes may be rounded to the other one.
    assert (found[0] - found[1]).norm() <= 0.02 * found[0].norm()
    assert 1e-3 < (found[0] - wide).norm() / wide.norm() < 0.2


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("asked", [{}, {"temperature": 0.8}, {"temperature": 0.8, "repetition_penalty": 1.2}], ids=str)
def test_ids_are_those_of_ar_with_the_same_cache(asked: dict[str, Any], tmp_path: Path) -> None:
    """Prompts in chunks and shared ones; hits, misses, and verifications behind one another."""
    target = tiny.llama(tmp_path / "target", seed=3)
    model = tiny.runner(target, torch.float64).model
    draft = tiny.runner(tiny.noisy_copy(target, tmp_path / "draft", noise=0.03), torch.float64)
    prompts = [tiny.token_ids(n, n) for n in (3, 50, 18)] + [tiny.token_ids(50, 50)[:30]]
    laws = params(4, 30, **asked)

    def run(mode: str, fp8: bool, overlap: bool = False) -> Texts:
        runner = StaticRunner(model, 300, PAGE_SIZE, most_rows=4, longest=5, cache_dtype="fp8" if fp8 else "auto")
        speculation = Speculation("ar") if mode == "ar" else Speculation("ssd", 4, (3,), backup="none")
        settings = config(speculation, max_num_seqs=4, num_pages=300)
        return Pair(settings, runner, None if mode == "ar" else Draft(settings, draft), overlap).run(prompts, laws)

    alone = run("ar", True)
    assert alone.ids != run("ar", False).ids, "else rounding would not show"
    for overlap in (False, True):
        texts = run("ssd", True, overlap)
        assert texts.ids == alone.ids
        assert sum(metrics.accepted_tokens for metrics in texts.metrics) > 10
