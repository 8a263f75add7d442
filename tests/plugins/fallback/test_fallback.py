"""What transformers' models may not do under our attention, and what a family without a file costs to find out.

Their logits are checked with those of the other families.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from ssd import LLM, SamplingParams
from ssd.config.params import Speculation
from ssd.errors import UsageError
from ssd.models.checkpoint import inspect
from ssd.models.sizes import ModelSizes
from ssd.plugins.fallback import paged
from tests.models import tiny
from tests.plugins.fallback.knobs import FALLBACK

# transformers 5.24 continues it wrongly.
BAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "attn_layer_indices": [1]}


def refusal(directory: Path) -> str:
    with pytest.raises(UsageError) as caught:
        tiny.runner(directory)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("recurrent_gemma", {"num_hidden_layers": 3, "lru_width": 32}, "its decoder returns no cache"),
        ("bamba", BAMBA, "a text in parts gets other logits"),
    ],
)
def test_models_with_other_caches_are_refused(kind: str, fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    told = refusal(tiny.model(kind, tmp_path, **fields))
    assert message in told and repr(kind) in told


@pytest.mark.parametrize("name", FALLBACK)
def test_the_plan_of_memory_knows_the_size_of_a_token(name: str, tmp_path: Path) -> None:
    kind, knobs = FALLBACK[name]
    directory = tiny.model(kind, tmp_path, **knobs)
    shape = tiny.runner(directory).model.shape
    planned = ModelSizes.of(inspect(directory)).kv_values_per_token
    assert planned == 2 * shape.layers * shape.kv_heads * shape.head_dim


def test_frequencies_that_move_with_the_length_are_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert "'dynamic'" in refusal(tiny.edit(tiny.model("olmo", tmp_path), rope_parameters=rope))


@pytest.mark.parametrize("fields", [{"model_type": "no_such"}, {"model_type": None}, {"model_type": ["olmo"]}])
def test_what_transformers_does_not_know_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    assert "does not know it" in refusal(tiny.edit(tiny.model("olmo", tmp_path), **fields))


def test_a_config_that_describes_no_model_is_refused(tmp_path: Path) -> None:
    directory = tiny.edit(tiny.model("olmo", tmp_path), num_attention_heads=0)
    assert "transformers" in refusal(directory)


def test_missing_and_misshapen_tensors_are_refused(tmp_path: Path) -> None:
    """transformers would fill them with random numbers."""
    file = tiny.model("olmo", tmp_path) / "model.safetensors"
    tensors = load_file(file)
    moved = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight" in refusal(tmp_path)
    save_file(tensors | {"model.layers.1.mlp.up_proj.weight": moved[1:].clone()}, file, metadata={"format": "pt"})
    assert "mismatched" in refusal(tmp_path) or "size" in refusal(tmp_path)


def test_an_adapter_beside_the_model_is_refused(tmp_path: Path) -> None:
    """It may name a model elsewhere, which would be fetched."""
    tiny.model("olmo", tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/other"}))
    assert "adapter" in refusal(tmp_path)


def test_a_draft_over_its_targets_tensors_is_refused(tmp_path: Path) -> None:
    directory = tiny.edit(tiny.model("olmo", tmp_path), shared_with_target=[])
    assert "shared_with_target" in refusal(directory)


def test_without_transformers_the_message_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tiny.model("gpt_neox", tmp_path)
    monkeypatch.setattr(paged, "installed_transformers", lambda: None)
    assert "pip install 'transformers" in refusal(directory)


def test_a_window_that_the_family_does_not_know_is_noticed(tmp_path: Path) -> None:
    assert "does not reach the layers" in refusal(tiny.edit(tiny.model("olmo", tmp_path), sliding_window=100))


def test_target_and_draft_generate_through_all_processes(tmp_path: Path) -> None:
    options = FALLBACK["starcoder2"][1] | {"vocab_size": 300, "eos_token_id": 2}
    target = tiny.tokenizer(tiny.model("starcoder2", tmp_path / "target", **options))
    draft = tiny.tokenizer(tiny.noisy_copy(target, tmp_path / "draft", noise=0.002))
    asked = SamplingParams(max_tokens=30, ignore_eos=True)
    with LLM(str(target), [str(draft)], dtype="float32") as llm:
        waiting, ahead, plain = (
            llm.generate(["A tiny random checkpoint"], [msgspec.structs.replace(asked, speculation=speculation)])[0]
            for speculation in (
                Speculation("sd", 3, (3,), "jit"),
                Speculation("ssd", 3, (2,), "jit"),
                Speculation("ar"),
            )
        )
    assert len(plain.token_ids) == 30 and waiting.token_ids == ahead.token_ids == plain.token_ids
    assert waiting.metrics.mean_acceptance_length > 1  # in `ssd` that is a matter of the clock
