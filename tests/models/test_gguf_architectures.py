"""GGUF files of every architecture: logits of the model that each was made of, in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ssd.execution.batch import Row
from ssd.models import hub
from tests.models import ggufs, tiny
from tests.models.knobs import FULL, LINEAR, LLAMA3, SLIDING, THETA

YARN = THETA | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = THETA | {"rope_type": "longrope", "original_max_position_embeddings": 32}
LONGROPE |= {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + 0.5 * i for i in range(8)]}
MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
GEMMA2 = {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 9,
    "layer_types": [SLIDING, FULL],
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": True,
}
GEMMA3 = {
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 9,
    "num_hidden_layers": 7,
    "layer_types": [SLIDING] * 5 + [FULL, SLIDING],
    "tie_word_embeddings": True,
    "rope_parameters": {
        FULL: LINEAR | {"rope_theta": 1e6},
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    },
}
GRANITE = {
    "logits_scaling": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.5,
    "embedding_multiplier": 2.0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama linear": ("llama", {"rope_parameters": LINEAR}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "llama of 3.1": ("llama", {"rope_parameters": THETA | LLAMA3}),
    "llama head_dim": ("llama", {"head_dim": 32}),
    "mistral": ("mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3_moe": ("qwen3_moe", MOE | {"head_dim": 16}),
    "gemma2": ("gemma2", GEMMA2),
    "gemma3": ("gemma3_text", GEMMA3),
    "gpt2": ("gpt2", {}),
    "gpt2 untied": ("gpt2", {"tie_word_embeddings": False, "n_inner": 96}),
    "phi3": ("phi3", {"pad_token_id": 0, "sliding_window": 9}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", GRANITE),
}
TYPES = ("F32", "Q8_0", "Q4_0", "Q5_1")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_CACHE", str(tmp_path / "cache"))


def logits_of(directory: Path, text: list[int]) -> Any:
    return tiny.runner(directory).forward([Row(text, 0, range(16), len(text))])


def rounded(made_of: Path, kind: str) -> None:
    """Round the tables of a checkpoint as its GGUF has them."""

    def table(name: str, weight: np.ndarray) -> np.ndarray:
        if weight.ndim != 2 or name.endswith("mlp.gate.weight"):
            return weight
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            return np.ascontiguousarray(ggufs.rounded(np.ascontiguousarray(weight.T), kind).T)
        return ggufs.rounded(weight, kind)

    weights = load_file(made_of / "model.safetensors")
    save_file({name: table(name, w) for name, w in weights.items()}, made_of / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_checkpoint_rounded(name: str, tmp_path: Path) -> None:
    """Each in one type of blocks and in float32, so that no type is left out."""
    model_type, config = MODELS[name]
    tiny.tokenizer(tmp_path)
    text = tiny.token_ids(60, 0, 300)
    for kind in ("F32", TYPES[1 + list(MODELS).index(name) % 3]):
        made_of = ggufs.write_model(tmp_path / f"{kind}.gguf", model_type, kind, **config)
        rounded(made_of, kind)
        logits = logits_of(hub.resolve(str(tmp_path / f"{kind}.gguf")), text)
        expected = tiny.oracle_logits(tiny.oracle(made_of), text)
        assert (logits - expected).abs().max() <= 1e-4 * max(1.0, expected.std())
        assert expected.std() > 0.1
