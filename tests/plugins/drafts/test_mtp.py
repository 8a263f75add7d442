"""MTP heads in a target's own checkpoint: computed as transformers' layers, found and refused by what the files say."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ssd.draft.chain_cache import ChainCache
from ssd.draft.process import load as load_drafts
from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.models import registry
from ssd.models.checkpoint import inspect
from ssd.models.sizes import weights
from ssd.plugins.drafts import mtp_config
from ssd.plugins.drafts.head_drafter import HeadContext
from ssd.verifier.loading import load as load_target
from tests.models import tiny
from tests.models.knobs import RECURRENT
from tests.plugins.drafts import mtp as heads

TEXT = tiny.token_ids(12, 12)
FAMILIES = {"qwen3": ("qwen3", {"head_dim": 8}), "qwen3 tied": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True})}
FAMILIES |= {
    name: RECURRENT[name] for name in ("qwen3_5_text", "qwen3_5_text tied, bias, eps", "qwen3_5_moe_text", "qwen3_next")
}


def checkpoint(folder: Path, family: str, **fields: Any) -> Path:
    kind, knobs = FAMILIES[family]
    return heads.with_head(tiny.model(kind, folder, **{**knobs, **fields}))


def before_norm(directory: Path) -> tuple[Tensor, heads.PlainHead]:
    """The target's states before its last norm, which the engine shows to the head."""
    plain = heads.PlainHead(directory)
    found: list[Tensor] = []
    hook = plain.target.model.norm.register_forward_pre_hook(lambda _, given: found.append(given[0]))
    plain.states(torch.tensor([TEXT]))
    hook.remove()
    return found[0][0], plain


def logits(directory: Path, states: Tensor, runner: Runner | None = None) -> Tensor:
    """About the tokens after each of TEXT from the second on."""
    runner = runner or heads.runner(directory)
    head: Any = runner.model
    chain_cache = ChainCache.new(head.shape, 1, 1, torch.float32, tiny.CPU)
    row = Row(TEXT[1:], 0, range(9), outputs=len(TEXT) - 1)
    context = HeadContext(runner.context([row]), [], runner.cache, chain_cache, [head.fuse(states[:-1])])
    return runner.run(row.token_ids, context, list(range(len(TEXT) - 1)))


@pytest.mark.parametrize("family", FAMILIES)
def test_its_logits_are_those_of_transformers_layer(tmp_path: Path, family: str) -> None:
    directory = checkpoint(tmp_path / "target", family)
    states, plain = before_norm(directory)
    found = logits(directory, states)
    for index in range(len(TEXT) - 1):
        expected = plain.logits(TEXT[: index + 2], index + 2)
        assert (found[index] - expected).abs().max() <= 1e-4


def test_the_text_part_of_a_multimodal_checkpoint_is_the_same(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "target", "qwen3_5_text")
    states, _ = before_norm(directory)
    expected = logits(directory, states)
    tensors = load_file(directory / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(renamed | {"model.visual.norm.weight": torch.ones(3)}, directory / "model.safetensors")
    text = json.loads((directory / "config.json").read_text())
    whole = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}, "tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(whole))
    assert torch.equal(logits(directory, states), expected)


def resolved(directory: Path, **fields: Any) -> Any:
    return resolve(EngineOptions(target=str(directory), **fields))


def test_it_drafts_unless_another_draft_or_none_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ssd.launch")
    directory = checkpoint(tmp_path / "target", "qwen3")
    for fields in ({}, {"mode": "ssd"}, {"draft": ("mtp",)}, {"mode": "sd", "draft": ("",)}):
        found = resolved(directory, **fields)
        assert (found.draft, found.draft_name) == ("mtp", "mtp")
        assert (found.features.layers, found.features.width) == ((2,), 32)
    assert caplog.text.count("the MTP head of") == 3
    for fields in ({"draft": ("none",)}, {"mode": "ar"}, {"mode": "ngram"}):
        assert resolved(directory, **fields).draft is None
    assert resolved(directory, draft=(str(directory),)).draft == str(directory)
    with pytest.raises(UsageError, match="mode sd needs a draft"):
        resolved(directory, draft=("none",), mode="sd")


def test_it_is_counted_once_and_loaded_without_weights(tmp_path: Path) -> None:
    for family in ("qwen3", "qwen3 tied"):
        directory = checkpoint(tmp_path / family, family)
        target, head = inspect(directory), registry.own_draft(inspect(directory), "mtp")
        layers = [info.shape for name, info in target.tensors.items() if name.startswith("model.layers.")]
        assert weights(head) == weights(target) - sum(map(prod, layers))
    assert resolved(directory, draft=("mtp",), load_format="dummy").draft == "mtp"
    assert resolved(directory, load_format="dummy").draft is None


def test_it_may_predict_a_list_of_ids(tmp_path: Path) -> None:
    """Those of `draft_vocab.safetensors`; the target predicts all."""
    directory = checkpoint(tmp_path / "target", "qwen3_5_text")
    states, _ = before_norm(directory)
    whole, ids = logits(directory, states), torch.tensor([7, 99, 3, 120])
    save_file({"ids": ids}, directory / "draft_vocab.safetensors")
    config = resolved(directory, draft=("mtp",), draft_dtype="float32")
    (runner,) = load_drafts(config)
    assert (runner.model.shape.outputs, load_target(config)[0].model.shape.outputs) == (4, 131)
    found = logits(directory, states, runner)
    assert (found - whole[:, ids.sort().values]).abs().max() <= 1e-5


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "two layers": ({}, {"mtp_num_hidden_layers": 2}, "an MTP head with 2 layers is not supported"),
    "embedding": ({}, {"mtp_use_dedicated_embeddings": True}, "an embedding of its own is not supported"),
    "tensor": ({"mtp.gate.weight": torch.ones(1)}, {}, "tensor mtp.gate.weight is not one of a supported MTP head"),
    "glm": ({"model.layers.2.eh_proj.weight": torch.ones(1)}, {}, "MTP head of qwen3 is .* model.layers.2.eh_proj"),
    "count": ({}, {"mtp_num_hidden_layers": "one"}, "mtp_num_hidden_layers must be a positive number, is 'one'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused(tmp_path: Path, case: str) -> None:
    tensors, fields, message = REFUSED[case]
    directory = tiny.edit(checkpoint(tmp_path / "target", "qwen3"), **fields)
    save_file(load_file(directory / "model.safetensors") | tensors, directory / "model.safetensors")
    with pytest.raises(UsageError, match=message):
        resolved(directory, draft=("mtp",))
    assert resolved(directory).draft is None


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe"])
def test_heads_of_other_families_are_named(tmp_path: Path, kind: str) -> None:
    directory = tiny.edit(tiny.qwen3(tmp_path / "target"), model_type=kind, num_nextn_predict_layers=1)
    with pytest.raises(UsageError, match=f"the MTP head of {kind} is not supported: its layer"):
        mtp_config.head_of(inspect(directory))


def test_without_a_head_there_is_none(tmp_path: Path) -> None:
    directory = tiny.qwen3(tmp_path / "target")
    with pytest.raises(UsageError, match="has no MTP head: give another --draft"):
        resolved(directory, draft=("mtp",))
    assert resolved(directory).draft is None


def test_gemmas_assistant_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4_assistant", "text_config": {}}))
    with pytest.raises(UsageError, match="'gemma4_assistant' are not supported: they attend to keys and values of"):
        inspect(tmp_path)
