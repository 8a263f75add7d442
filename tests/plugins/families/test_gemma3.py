"""Gemma 3 with a vision tower: its text part is read as the text model it is, in either way of naming tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.layers.rotary import frequencies
from ssd.models.checkpoint import read_config
from ssd.models.layer_kinds import FULL
from ssd.plugins.families.gemma3 import ByKind, Gemma3
from ssd.plugins.families.olmo3 import Olmo3
from tests.models import tiny
from tests.plugins.families.knobs import GEMMA3

TEXT = tiny.token_ids(60, 0)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A random model of text and images, as transformers writes it."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    sizes: dict[str, Any] = {k: v for k, v in tiny.SIZES.items() if k != "tie_word_embeddings"} | GEMMA3
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=sizes, vision_config=vision | {"image_size": 28, "patch_size": 14}, mm_tokens_per_image=4
    )
    model = Gemma3ForConditionalGeneration(config).float()
    return tiny._write(model, tmp_path / "whole", 0, 0.2, False)


def check(directory: Path, whole: Path) -> None:
    from transformers import Gemma3ForConditionalGeneration

    oracle = Gemma3ForConditionalGeneration.from_pretrained(whole, dtype=torch.float32, attn_implementation="eager")
    expected = tiny.oracle_logits(oracle.eval(), TEXT)
    found = tiny.runner(directory).forward([Row(TEXT, 0, range(64), outputs=len(TEXT))])
    assert (found - expected).abs().max() <= 1e-4


def test_the_text_part_gives_the_logits_of_the_whole(whole: Path) -> None:
    check(whole, whole)


def test_tensors_may_have_their_newer_names(whole: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    tensors = load_file(whole / "model.safetensors")
    assert any(name.startswith("language_model.model.") for name in tensors)
    renamed = {name.replace("language_model.model.", "model.language_model."): t for name, t in tensors.items()}
    save_file(renamed, other / "model.safetensors")
    (other / "config.json").write_bytes((whole / "config.json").read_bytes())
    check(other, whole)


def test_what_the_nested_config_leaves_out_is_as_in_the_first_model(tmp_path: Path) -> None:
    """As in the 4B checkpoint."""
    text = {"hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    config = {
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": text,
        "vision_config": {"hidden_size": 1},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_config(tmp_path)
    assert found["eos_token_id"] == [1, 106] and "vision_config" not in found and "text_config" not in found
    numbers = {"hidden_size": 2560, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    assert found.items() >= (numbers | {"model_type": "gemma3_text", "vocab_size": 262208}).items()


@pytest.mark.parametrize("family", [Gemma3, Olmo3])
def test_fields_of_all_kinds_of_layers_are_read_beside_those_of_one(family: type[ByKind]) -> None:
    """Half rotated heads are refused, and YaRN's length counts at the top level, as it does in transformers."""
    yarn: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0}
    length = {"original_max_position_embeddings": 64}
    rotations = [
        frequencies(16, family.rope(object.__new__(family), config, FULL), 256).inverse
        for config in ({**length, "rope_scaling": yarn}, {"rope_scaling": {**yarn, **length}})
    ]
    assert torch.equal(*rotations)
    with pytest.raises(UsageError, match="whole"):
        frequencies(16, family.rope(object.__new__(family), {"partial_rotary_factor": 0.5}, FULL), 256)
