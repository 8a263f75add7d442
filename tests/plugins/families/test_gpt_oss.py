"""The gpt-oss family: all modes of a whole engine, and its stacks of experts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ssd import LLM, SamplingParams
from ssd.config.params import Speculation
from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.kernels import cpu
from ssd.kernels.groups import Groups, grouped_product
from ssd.layers.quantized import PackedProduct
from ssd.models.checkpoint import inspect
from ssd.models.resident import resident_bytes
from ssd.models.weights import from_checkpoint
from tests.draft.pair import Draft, Pair, config, params
from tests.models import tiny
from tests.plugins.families.knobs import GPT_OSS

KNOBS = GPT_OSS
WIDE = KNOBS | {"hidden_size": 64, "intermediate_size": 96}


def published(directory: Path, **options: Any) -> tuple[Path, Path]:
    """A checkpoint with experts in MXFP4, as they are published, and one with the numbers that transformers reads."""
    made = tiny.model("gpt_oss", directory / "floats", **WIDE | options)
    generator, tensors = torch.Generator().manual_seed(3), load_file(made / "model.safetensors")
    blocks, floats = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = blocks.pop(name).shape
        codes = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, codes.shape[:3], generator=generator, dtype=torch.uint8)
        blocks |= {f"{name}_blocks": codes, f"{name}_scales": scales}
        floats[name] = convert_moe_packed_tensors(codes, scales, dtype=torch.float32).contiguous()
    (directory / "mxfp4").mkdir()
    shutil.copy(made / "config.json", directory / "mxfp4")
    for folder, found in ((made, floats), (directory / "mxfp4", blocks)):
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    return tiny.edit(directory / "mxfp4", quantization_config=settings), made


def test_all_modes_give_the_ids_of_ar(tmp_path: Path) -> None:
    options = KNOBS | {"vocab_size": 300, "eos_token_id": 2}
    target = tiny.tokenizer(tiny.model("gpt_oss", tmp_path / "target", **options))
    draft = tiny.tokenizer(tiny.noisy_copy(target, tmp_path / "draft", noise=0.002))
    asked = SamplingParams(max_tokens=60, ignore_eos=True)
    modes = Speculation("ar"), Speculation("ngram", 3, (3,), "jit"), Speculation("sd", 3, (3,), "jit")
    with LLM(str(target), [str(draft)], dtype="float32") as llm:
        plain, *others, waiting, ahead = (
            llm.generate(["A tiny random checkpoint"], [msgspec.structs.replace(asked, speculation=speculation)])[0]
            for speculation in (*modes, Speculation("ssd", 3, (2,), "jit"))
        )
    assert len(plain.token_ids) == 60
    assert all(other.token_ids == plain.token_ids for other in (*others, waiting, ahead))
    assert waiting.metrics.mean_acceptance_length > 1


@pytest.mark.parametrize(
    ("name", "fault"), [("gate_up_proj", lambda stack: stack[:5]), ("down_proj_bias", lambda stack: stack[None])]
)
def test_a_stack_of_another_shape_is_refused(name: str, fault: object, tmp_path: Path) -> None:
    file = tiny.model("gpt_oss", tmp_path, **KNOBS) / "model.safetensors"
    tensors = load_file(file)
    wrong = f"model.layers.1.mlp.experts.{name}"
    assert callable(fault)
    save_file(tensors | {wrong: fault(tensors[wrong]).contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(UsageError, match=f"{wrong} of shape .* is not a stack of 6 experts"):
        inspect(tmp_path)


# -- MXFP4 ------------------------------------------------------------------------------------------------------------


def test_experts_in_mxfp4_are_those_of_transformers_in_four_bits(tmp_path: Path) -> None:
    stored, floats = published(tmp_path)
    read, plain = (from_checkpoint(inspect(folder), torch.float32, tiny.CPU) for folder in (stored, floats))
    for index in range(6):
        below, other = (part.below(f"model.layers.1.mlp.experts.{index}") for part in (read, plain))
        weight = below.stacked([("gate_proj", 96), ("up_proj", 96)], 64)
        assert isinstance(weight, Groups)
        assert torch.equal(weight.dequantized(), other.stacked([("gate_proj", 96), ("up_proj", 96)], 64))
        assert torch.equal(below("down_proj.weight", 64, 96), other("down_proj.weight", 64, 96))
        assert torch.equal(PackedProduct(weight).rows(torch.arange(192)), weight.dequantized())  # as on a GPU
        if cpu.multiply_floats(torch.empty(0)):
            assert grouped_product(weight, None).bytes == 192 * 64 * 17 // 32
    if cpu.multiply_floats(torch.empty(0)):
        assert resident_bytes(inspect(stored), "float32") < 0.6 * resident_bytes(inspect(floats), "float32")


def test_logits_in_mxfp4_are_those_of_transformers(tmp_path: Path) -> None:
    stored, floats = published(tmp_path)
    text = tiny.token_ids(50, 0)
    logits = tiny.runner(stored).forward([Row(text, 0, range(64), 50)])
    assert (logits - tiny.oracle_logits(tiny.oracle(floats), text)).abs().max() <= 1e-4


def test_speculation_in_mxfp4_gives_the_ids_of_ar(tmp_path: Path) -> None:
    target = tiny.runner(published(tmp_path)[0])
    draft = Runner(target.model, 400, 16)
    prompts, asked = [tiny.token_ids(n, n) for n in (3, 16, 41)], params(3, 40)
    alone = Pair(config(Speculation("ar")), target).run(prompts, asked).ids
    for mode in ("sd", "ssd"):
        settings = config(Speculation(mode, 4, (3,) if mode == "sd" else (2,), "jit"))
        assert Pair(settings, target, Draft(settings, draft)).run(prompts, asked).ids == alone


def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    file = published(tmp_path)[0] / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.experts.down_proj_scales"][3, 2, 1] = 255
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"experts.3.down_proj.weight_scales has a scale that is not finite"):
        tiny.runner(file.parent)


def test_blocks_without_scales_are_refused(tmp_path: Path) -> None:
    file = published(tmp_path)[0] / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"down_proj.weight_scales is missing"):
        inspect(file.parent)
