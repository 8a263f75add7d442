"""GGUF files of families with states: the order of their heads, their decays and norms are those of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from ssd.errors import UsageError
from ssd.models import hub, registry
from ssd.models.checkpoint import inspect, read_config
from tests.models import ggufs, tiny
from tests.models.knobs import DEFAULT, DELTA, FULL, THETA
from tests.models.states import StatesContext, forward

pytestmark = pytest.mark.usefixtures("own_cache")

QWEN3_5 = {
    "std": 0.1,
    "head_dim": 32,
    "num_hidden_layers": 5,
    "layer_types": [DELTA, FULL, DELTA, FULL, DELTA],
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "rope_parameters": DEFAULT | THETA | {"partial_rotary_factor": 0.25},
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen35": ("qwen3_5_text", QWEN3_5),
    "qwen35 without shared keys": ("qwen3_5_text", QWEN3_5 | {"linear_num_key_heads": 6, "tie_word_embeddings": True}),
    "qwen35moe": ("qwen3_5_moe_text", QWEN3_5 | MOE),
    "qwen3next": ("qwen3_next", QWEN3_5 | MOE),
}
TEXT = tiny.token_ids(40, 0, 300)


def logits_of(directory: Path) -> torch.Tensor:
    model = registry.load(inspect(directory), torch.float32, tiny.CPU, tiny.MAX_POSITION)
    return forward(model, StatesContext(model, 1), (0, 0, TEXT))


def rounded(made_of: Path, kind: str) -> None:
    """Round the tables of a checkpoint as its GGUF has them."""

    def table(name: str, weight: np.ndarray) -> np.ndarray:
        if weight.ndim != 2 or name.endswith("gate.weight") or weight.shape[1] % 32:
            return weight
        return ggufs.rounded(weight, kind)

    weights = load_file(made_of / "model.safetensors")
    save_file({name: table(name, w) for name, w in weights.items()}, made_of / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_checkpoint_rounded(name: str, kind: str, tmp_path: Path) -> None:
    check_logits(*MODELS[name], kind, tmp_path)


def check_logits(model_type: str, config: dict[str, Any], kind: str, folder: Path) -> None:
    tiny.tokenizer(folder)
    made_of = ggufs.write_model(folder / "x.gguf", model_type, kind, **config)
    if kind != "F32":
        rounded(made_of, kind)
    expected = tiny.oracle_logits(tiny.oracle(made_of), TEXT)
    found = logits_of(hub.resolve(str(folder / "x.gguf")))
    assert (found - expected).abs().max() <= 1e-4 * max(1.0, expected.std())
    assert expected.std() > 0.1


def test_mtp_layers_of_a_file_are_left_alone(tmp_path: Path) -> None:
    """They follow the model's, and are counted among them."""
    tiny.tokenizer(tmp_path)
    more = {"qwen35.block_count": 6, "qwen35.nextn_predict_layers": 1}
    tensors = {
        "blk.5.nextn.eh_proj.weight": np.ones((64, 128), np.float32),
        "blk.5.attn_norm.weight": np.ones(64, np.float32),
    }
    made_of = ggufs.write_model(tmp_path / "x.gguf", "qwen3_5_text", metadata=more, tensors=tensors, **QWEN3_5)
    directory = hub.resolve(str(tmp_path / "x.gguf"))
    assert read_config(directory)["num_hidden_layers"] == 5
    expected = tiny.oracle_logits(tiny.oracle(made_of), TEXT)
    assert (logits_of(directory) - expected).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"qwen35.full_attention_interval": None}, "full_attention_interval"),
        ({"qwen35.expert_count": 4}, "qwen35.expert_count 4 is not supported"),
        ({"qwen35.ssm.dt_b_c_rms": True}, "qwen35.ssm.dt_b_c_rms True is not supported"),
    ],
)
def test_metadata_that_asks_for_what_is_not_done_is_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tiny.tokenizer(tmp_path)
    ggufs.write_model(tmp_path / "x.gguf", "qwen3_5_text", metadata=fields, **QWEN3_5)
    with pytest.raises(UsageError, match=message):
        hub.resolve(str(tmp_path / "x.gguf"))
