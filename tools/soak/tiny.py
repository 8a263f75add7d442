"""Checkpoints of a few kilobytes: a random target, and a draft that agrees with it now and then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ssd.models.families.llama import Llama
from ssd.models.weights import Weights, dummy

VOCABULARY = 131
CONTEXT = 256
_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
# Weights so large make texts vary; a draft so far off is right about every other time.
_SCALE, _NOISE = 10.0, 0.01


def pair(directory: Path, **config: Any) -> tuple[Path, Path]:
    """Write both. `config` overrides fields of their config.json. Returns their folders."""
    config = _CONFIG | config
    weights = _random_weights(config)
    generator = torch.Generator().manual_seed(1)
    moved = {name: t + _NOISE * torch.randn(t.shape, generator=generator) for name, t in weights.items()}
    return _written(directory / "target", config, weights), _written(directory / "draft", config, moved)


def _random_weights(config: dict[str, Any]) -> dict[str, Tensor]:
    """Return random tensors by the names that the family asks for."""
    small, found = dummy(torch.float32, torch.device("cpu")), dict[str, Tensor]()

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        found[name] = small(name, *shape) * (1.0 if name.endswith("norm.weight") else _SCALE)
        return found[name]

    Llama(config, Weights(read), torch.float32, torch.device("cpu"), CONTEXT)
    return found


def _written(directory: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
