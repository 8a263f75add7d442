"""A draft over its target's embedding, read as the draft process reads it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ssd.config import EngineConfig
from ssd.draft.process import load
from ssd.execution.batch import Row
from ssd.models.checkpoint import SHARED
from tests.models import tiny

EMBEDDING = "model.embed_tokens.weight"


def test_the_draft_computes_with_its_targets_embedding(tmp_path: Path) -> None:
    target = tiny.llama(tmp_path / "target")
    whole = tiny.noisy_copy(target, tmp_path / "whole", noise=0.1)
    tensors = load_file(whole / "model.safetensors")
    tensors[EMBEDDING] = load_file(target / "model.safetensors")[EMBEDDING]
    save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
    draft = tmp_path / "draft"
    draft.mkdir()
    save_file({name: tensor for name, tensor in tensors.items() if name != EMBEDDING}, draft / "model.safetensors")
    config = json.loads((whole / "config.json").read_text()) | {SHARED: [EMBEDDING]}
    (draft / "config.json").write_text(json.dumps(config))
    made = EngineConfig(target=str(target), draft=str(draft), max_model_len=64, num_pages=64, draft_num_pages=64)
    rows = [Row(tiny.token_ids(12, seed=1), 0, range(3), outputs=12)]
    assert torch.equal(load(made).forward(rows), tiny.runner(whole, page_size=16).forward(rows))
