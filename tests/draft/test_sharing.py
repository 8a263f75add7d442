"""Drafts that are not whole models: those without an embedding, and those with a head for the first ids only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ssd.config.engine import EngineConfig
from ssd.config.params import Speculation
from ssd.draft.process import load
from ssd.execution.batch import Row
from ssd.models.pairs import DRAFT_VOCAB, SHARED
from tests.draft.pair import Draft, Pair, config, params
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
    (draft / "config.json").write_text(
        json.dumps(json.loads((whole / "config.json").read_text()) | {SHARED: [EMBEDDING]})
    )
    made = EngineConfig(target=str(target), draft=str(draft), max_model_len=64, num_pages=64, draft_num_pages=64)
    rows = [Row(tiny.token_ids(12, seed=1), 0, range(3), outputs=12)]
    assert torch.equal(load(made)[-1].forward(rows), tiny.runner(whole, page_size=16).forward(rows))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_with_a_smaller_head_proposes_the_first_ids_only(tmp_path: Path, temperature: float) -> None:
    """It reads every id, proposes small ids only, and changes no token."""
    target = tiny.llama(tmp_path / "target", seed=3)
    small = tiny.noisy_copy(target, tmp_path / "draft", noise=0.01)
    whole = tiny.runner(small)
    config_file = small / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {DRAFT_VOCAB: 70}))
    runner, judge = tiny.runner(small), tiny.runner(target)
    rows = [Row([120, 3, 99], 0, range(3), outputs=3)]
    assert torch.equal(runner.forward(rows), whole.forward(rows)[:, :70])

    prompts = [tiny.token_ids(n, n) for n in (5, 40)]
    settings = config(Speculation("ssd", 4, (3,), "jit"))
    texts = Pair(settings, judge, Draft(settings, runner)).run(prompts, params(2, 60, temperature))
    plain = Pair(config(Speculation("ar")), judge).run(prompts, params(2, 60, temperature))
    assert texts.ids == plain.ids
    assert max(token for ids in texts.ids for token in ids) >= 70
    assert sum(m.accepted_tokens for m in texts.metrics) > 0
