"""`--quantize int8`: every mode gives the ids of `ar` with the same rounded weights, whatever the draft's are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ssd.config.params import Mode, SamplingParams, Speculation
from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.layers.int8 import LEVELS, round_to_int8
from ssd.layers.ranks import Ranks
from ssd.models.quantization import QUANTIZATION
from tests.draft.pair import Draft, Pair, config
from tests.models import tiny
from tests.ranks import part, side_by_side
from tools.distill.layouts import quantization_config
from tools.distill.teacher import load_runner

PAGES = 512


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Runner]:
    """A target in 8 bits, and a draft that agrees with it now and then, in 8 bits and in float32."""
    folder = tmp_path_factory.mktemp("models")
    target = tiny.llama(folder / "target", seed=3, attention_bias=True)
    draft = tiny.noisy_copy(target, folder / "draft", noise=0.03)
    return {
        name: tiny.runner(directory, pages=PAGES, deterministic=True, int8=int8)
        for name, directory, int8 in (("target", target, True), ("int8", draft, True), ("float", draft, False))
    }


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft", ["int8", "float"])
def test_ids_are_those_of_ar(runners: dict[str, Runner], draft: str, temperature: float) -> None:
    prompts = [tiny.token_ids(length, seed=length) for length in (1, 4, 17, 40)]
    params = [SamplingParams(temperature, seed=seed, max_tokens=40) for seed in range(len(prompts))]

    def pair(mode: Mode) -> Pair:
        settings = config(Speculation(mode, 4, (3,), "jit"), num_pages=PAGES, draft_num_pages=PAGES, deterministic=True)
        return Pair(settings, runners["target"], None if mode == "ar" else Draft(settings, runners[draft]))

    expected = pair("ar").run(prompts, params).ids
    for mode in ("sd", "ssd"):
        texts = pair(mode).run(prompts, params)
        assert texts.ids == expected
        assert sum(m.accepted_tokens for m in texts.metrics) > 10


def test_the_weights_are_what_is_rounded(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Near the model's own logits, and not the same."""
    directory = tiny.llama(tmp_path_factory.mktemp("model"), tie_word_embeddings=True)
    ids = tiny.token_ids(30, 1)
    expected = tiny.oracle_logits(tiny.oracle(directory), ids)
    runner = tiny.runner(directory, int8=True)
    ours = runner.forward([Row(ids, 0, range(8), len(ids))])
    error = (ours - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.03
    assert ours.dtype == torch.float32


def stored_in_8_bits(source: Path, folder: Path) -> tuple[Path, Path]:
    """The model with linear layers in 8 bits, as `compressed-tensors` has them, and with these as float32."""
    tensors = load_file(source / "model.safetensors")
    integers, floats = dict(tensors), dict(tensors)
    for name in [name for name, tensor in tensors.items() if tensor.ndim == 2 and "embed" not in name]:
        integers[name], scales = round_to_int8(tensors[name], LEVELS)
        integers[f"{name}_scale"] = scales[:, None]
        floats[name] = integers[name] * scales[:, None]
    for name, found in (("int8", integers), ("float", floats)):
        tiny.noisy_copy(source, folder / name, noise=0)
        save_file(found, folder / name / "model.safetensors", metadata={"format": "pt"})
    return tiny.edit(folder / "int8", **{QUANTIZATION: quantization_config(8)}), folder / "float"


def logits(directory: Path, int8: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    ids = tiny.token_ids(30, 1)
    return tiny.runner(directory, dtype, int8=int8).forward([Row(ids, 0, range(8), len(ids))])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_weights_in_8_bits_are_read_as_they_are(tmp_path: Path, kind: str, tied: bool) -> None:
    source = tiny.model(kind, tmp_path / "source", tie_word_embeddings=tied)
    integers, floats = stored_in_8_bits(source, tmp_path)
    assert (integers / "model.safetensors").stat().st_size < 0.6 * (floats / "model.safetensors").stat().st_size
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(logits(integers, dtype=dtype), logits(floats, dtype=dtype))
    assert torch.equal(logits(integers, int8=True), logits(floats, int8=True))
    assert not torch.equal(logits(integers), logits(source))


def test_ranks_read_their_part_of_weights_in_8_bits(tmp_path: Path) -> None:
    integers, floats = stored_in_8_bits(tiny.llama(tmp_path / "source"), tmp_path)
    ids = tiny.token_ids(30, 1)

    def of(directory: Path) -> Tensor:
        def rank(ranks: Ranks) -> Tensor:
            return part(directory, ranks).forward([Row(ids, 0, range(8), len(ids))])

        return side_by_side(2, rank)[0]

    assert torch.equal(of(integers), of(floats))


def test_a_draft_borrows_scales_too(tmp_path: Path) -> None:
    """The target's `lm_head` is in 8 bits, the draft's own layers are not."""
    target, floats = stored_in_8_bits(tiny.llama(tmp_path / "target"), tmp_path)
    draft = tiny.llama(tmp_path / "draft", seed=1)
    tensors = load_file(draft / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    tiny.edit(draft, shared_with_target=["lm_head.weight"])
    found = []
    for lender in (target, floats):
        runner = load_runner(str(draft), torch.float32, tiny.CPU, 64, lender=str(lender), activations="float32")
        found.append(runner.forward([Row([1, 2, 3], 0, range(2), outputs=3)]))
    assert torch.equal(*found)


def test_what_is_stored_in_another_way_is_refused(tmp_path: Path) -> None:
    integers, _ = stored_in_8_bits(tiny.llama(tmp_path / "source"), tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(integers / "model.safetensors")
    scales = tensors[f"{name}_scale"]
    broken: list[tuple[Tensor | None, str]] = [
        (None, rf"tensor {name}_scale is missing"),
        (scales[:5], r"_scale of shape \(5, 1\) does not fit .*expected \(52, any\)"),
        (scales.to(torch.int8), "_scale has type I8"),
        (scales / 0, f"tensor {name}_scale holds numbers that are not finite"),
    ]
    for scale, message in broken:
        left = {key: tensor for key, tensor in tensors.items() if key != f"{name}_scale"}
        changed = left if scale is None else left | {f"{name}_scale": scale.contiguous()}
        save_file(changed, integers / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UsageError, match=message):
            logits(integers)
    save_file(tensors, integers / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match="has type I8: quantised weights are not read"):
        logits(tiny.edit(integers, **{QUANTIZATION: None}))
