"""Layers with states on a GPU: the kernels, and the ids of all modes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ssd import LLM, SamplingParams
from ssd.config.params import Mode, Speculation
from ssd.layers.recurrent import GatedDelta, Recurrence, ShortConvolution, StateRow
from tests.models import tiny
from tests.models.knobs import RECURRENT

PROMPTS = [[1, 2, 3, 4], [200, 7], [9] * 20, list(range(40))]
MODES: tuple[Mode, ...] = ("ar", "ngram", "sd", "ssd")
TOKENS = 70


def made(kind: str, device: torch.device) -> tuple[Recurrence, int]:
    """A recurrence of a published model's sizes, and the numbers of a token's queries."""
    made = torch.Generator().manual_seed(1)
    if kind == "convolution":
        weight, bias = torch.randn(6144, 4, generator=made), torch.randn(6144, generator=made)
        return ShortConvolution(weight.to(device), bias.to(device), silu=True), 0
    decay, bias = -torch.rand(32, generator=made) * 8, torch.randn(32, generator=made)
    return GatedDelta(decay.to(device), bias.to(device), 16, 128, 128), 16 * 128


def numbers(count: int, size: int, seed: int) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["convolution", "delta"])
def test_any_cut_gives_the_same_bits_and_the_numbers_of_a_cpu(
    kind: str, dtype: torch.dtype, device: torch.device
) -> None:
    (here, read), (there, _) = made(kind, device), made(kind, torch.device("cpu"))
    size, chance = here.size, random.Random(0)
    changes, queries = numbers(TOKENS, size.change, 3).to(dtype), numbers(TOKENS, read, 4).to(dtype)
    states, kept = torch.zeros(2, *size.state), torch.zeros(TOKENS, size.change)
    expected = there(states, kept, changes.float(), queries.float(), (StateRow(-1, (), TOKENS, 0, TOKENS),))
    mine = [x.to(device) for x in (torch.full((3, *size.state), torch.nan), kept, changes, queries)]
    whole = here(*mine, (StateRow(-1, (), TOKENS, 0, TOKENS),))
    error = (whole.double().cpu() - expected).norm() / expected.norm()
    assert error <= (1e-5 if dtype == torch.float32 else 1e-2)
    assert (mine[0][0].double().cpu() - states[0]).norm() <= 1e-4 * states[0].norm()
    start = base = 0
    while start < TOKENS:
        right, wrong = min(chance.choice((1, 1, 2, 9)), TOKENS - start), chance.randrange(4)
        junk = [numbers(wrong, x.shape[1], start).to(x) for x in (changes, queries)]
        new = [
            torch.cat((x[start : start + right], more)).to(device)
            for x, more in zip((changes, queries), junk, strict=True)
        ]
        written = chance.randint(0, start - base + right)
        row = StateRow(1 if base else -1, range(base, start), right + wrong, 1, written)
        assert torch.equal(here(*mine[:2], *new, (row,))[:right], whole[start : start + right])
        mine[1][start : start + right] = new[0][:right].float()
        base, start = base + written, start + right
    last = StateRow(1 if base else -1, range(base, start), 0, 2, start - base)
    here(*mine[:2], *(x[:0].to(device) for x in (changes, queries)), (last,))
    assert torch.equal(mine[0][2], mine[0][0])


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def test_every_mode_says_the_same(family: str, device: torch.device, tmp_path: Path) -> None:
    check_modes(*RECURRENT[family], device, tmp_path)


def check_modes(kind: str, knobs: dict[str, Any], device: torch.device, folder: Path) -> None:
    """In float32, where rounding differs by shape: in a near-tie ids might, too, but there is none here."""
    target = tiny.model(kind, folder / "target", **knobs | {"vocab_size": 300, "max_position_embeddings": 512})
    draft = tiny.noisy_copy(target, folder / "draft", noise=0.003)
    sizes = {"max_num_seqs": 4, "max_model_len": 256, "gpu_memory_utilization": 0.5, "dtype": "float32"}
    places = {"device": str(device), "draft_device": str(device), "draft_dtype": "float32"}
    found = {}
    with LLM(str(target), str(draft), **places, **sizes) as llm:
        for mode in MODES:
            speculation = Speculation(mode, 4, (3,), "jit")
            for turn in ("cold", "warm"):
                asked = [
                    SamplingParams(t, seed=4, max_tokens=40, ignore_eos=True, speculation=speculation, store=False)
                    for t in (0.0, 0.8)
                ]
                found[mode, turn] = [answer.token_ids for one in asked for answer in llm.generate(PROMPTS, one)]
    with LLM(str(target), mode="ar", device="cpu", max_num_seqs=4, max_model_len=256) as llm:
        asked = [SamplingParams(t, seed=4, max_tokens=40, ignore_eos=True) for t in (0.0, 0.8)]
        plain = [answer.token_ids for one in asked for answer in llm.generate(PROMPTS, one)]
    assert all(ids == plain for ids in found.values())
