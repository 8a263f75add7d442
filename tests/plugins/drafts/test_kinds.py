"""Drafts that read hidden states, as the launcher, `ssd models` and the tools see them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ssd.config.gpus import Gpu
from ssd.errors import UsageError
from ssd.launch import memory
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.models import pairs
from ssd.models.checkpoint import inspect
from ssd.models.pull import BUILTIN
from ssd.models.sizes import ModelSizes
from ssd.system import cgroups
from tests.cli.test_models import described
from tests.launch.test_resolve import GIB, OF_CPU, ONE_GPU, cards, config, no_weights
from tests.models import tiny
from tests.plugins.drafts import blocks, heads, mtp
from tests.tuning.test_draft_format import LIGHT, stored
from tools.distill import report
from tools.distill.teacher import load_runner

__all__ = ["cards", "no_weights"]


def test_an_eagle_head(tmp_path: Path) -> None:
    target, head = heads.target(tmp_path / "target"), heads.head(tmp_path / "head")
    assert described(head)["family"] == "an EAGLE-3 head, a draft only"
    assert described(target, "--draft", head)["draft_fits"] is True
    assert "can only be a draft" in described(head, "--draft", target)["draft_why_not"]


def test_an_mtp_head(tmp_path: Path) -> None:
    target = tiny.qwen3(tmp_path / "target")
    assert "has no MTP head" in described(target, "--draft", "mtp")["draft_why_not"]
    assert described(mtp.with_head(target), "--draft", "mtp")["draft_fits"] is True


def test_hidden_states_take_room_on_the_gpu(cards: list[Gpu], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And none in the memory of the host, which may have less."""
    target, head = heads.target(tmp_path / "target"), heads.head(tmp_path / "head", 40)
    page = 16 * 4 * ModelSizes.of(inspect(target)).kv_values_per_token
    states = 16 * 4 * heads.WIDTH

    def pages(draft_device: str, given: int | None = None) -> int:
        asked: dict[str, Any] = OF_CPU | {"device": "cuda", "draft_device": draft_device}
        asked |= {"kv_cache_memory_bytes": given}
        return resolve(
            EngineOptions(target=str(target), draft=(str(head),), gpu_memory_utilization=1, **asked)
        ).num_pages

    cards[0] = Gpu(3 * GIB // 2, 3 * GIB // 2)
    room = pages("cpu") * page
    assert abs(pages("cuda:1") - room // (page + states)) <= 1
    assert pages("cuda:1", room // 4) == pages("cpu", room // 4)
    with pytest.raises(UsageError, match="the target has no room on cuda:0"):
        pages("cuda:1", room)
    monkeypatch.setattr(cgroups, "available_bytes", lambda: 2**20)
    monkeypatch.setattr(memory, "check_room", lambda *_: None)
    assert pages("cuda:1") > 0
    with pytest.raises(UsageError, match="a draft that reads hidden states needs"):
        pages("cpu")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"device": "cuda:2"}, "--device cuda:2 needs cuda:2: no such GPU, there are 2 here"),
        ({"draft_device": "cuda:7"}, "--draft-device cuda:7: no such GPU, there are 2 here; cpu is always there"),
        ({"device": "cuda:1", "tensor_parallel_size": 2}, "--tensor-parallel-size 2 needs cuda:2: no such GPU"),
        ({"device": "cuda", "gpu_memory_utilization": 0.05}, "the target has no room on cuda:0"),
        ({"draft_device": "cuda", "gpu_memory_utilization": 0.05}, "the draft has no room on cuda:0"),
        ({"device": "gpu"}, "no device 'gpu'; give cpu, cuda or cuda:N"),
        ({"draft_device": "cuda:-1"}, "no device 'cuda:-1'"),
        ({"device": "cuda", "kv_cache_memory_bytes": 15 * GIB}, "the target has no room on cuda:0"),
    ],
    ids=str,
)
def test_a_gpu_that_is_not_there_or_too_small_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        config(**asked)


def test_a_draft_of_another_kind_has_a_process(tmp_path: Path) -> None:
    target, head = heads.target(tmp_path / "target"), heads.head(tmp_path / "head", 40)
    with pytest.raises(UsageError, match="--inline-draft on: the draft is an EAGLE-3 head"):
        config(**ONE_GPU, target=str(target), draft=(str(head),), max_model_len=100, inline_draft="on")


def test_a_scripted_target_has_no_hidden_states_for_a_head(tmp_path: Path) -> None:
    """The head of this folder is read so far before it is loaded: it has neither `lm_head` nor embedding."""
    fields = inspect(BUILTIN["smollm2-draft"].directory).config | {"architectures": ["LlamaForCausalLMEagle3"]}
    del fields[pairs.SHARED]
    (tmp_path / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": 1, "draft_vocab_size": 16384}))
    tensors = {"d2t": torch.zeros(16384, dtype=torch.long), "fc.weight": torch.zeros(576, 3 * 576)}
    save_file(tensors, tmp_path / "model.safetensors")
    found = config(target="smollm2", draft=(str(tmp_path),))
    assert found.features is not None and (found.features.layers, found.features.width) == ((2, 15, 27), 3 * 576)
    asked: dict[str, Any] = {"target": "smollm2", "load_format": "dummy", "synthetic_acceptance_length": 2.0}
    with pytest.raises(UsageError, match=r"is an EAGLE-3 head, .* --synthetic-acceptance-length needs another --draft"):
        config(draft=(str(tmp_path),), num_speculative_tokens=4, fan_out=(3,), **asked)


def test_a_light_head_keeps_keys_and_values_in_float32(tmp_path: Path) -> None:
    """It reads the states of the target."""
    target, head = heads.target(tmp_path / "deep"), heads.head(tmp_path / "head")
    found = resolve(EngineOptions(target=str(target), draft=(str(head),), draft_weights="light"))
    assert stored(found, LIGHT) == torch.float32


def test_a_draft_that_cannot_be_evaluated_is_named(tmp_path: Path) -> None:
    target = tiny.tokenizer(blocks.target(tmp_path / "target"))
    drafter = blocks.block(tmp_path / "draft")
    runner = load_runner(str(target), torch.float32, tiny.CPU, 64)
    with pytest.raises(UsageError, match=f"{drafter} is a block drafter: .* EAGLE-3 heads are evaluated"):
        report._draft(str(target), str(drafter), runner)
