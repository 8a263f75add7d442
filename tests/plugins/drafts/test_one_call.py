"""A step of a head or of a block drafter in one call of our kernels: the bits of single calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ssd.config.engine import Features
from ssd.law import Law
from ssd.plugins.drafts.eagle3_config import OUTPUTS
from tests.draft import pair
from tests.draft.pair import VOCABULARY, Draft
from tests.draft.test_vocabulary import GREEDY, OURS, WARM, load, played, settings, steps_of
from tests.models import tiny
from tests.plugins.drafts import blocks, heads

HEADS: dict[str, dict[str, Any]] = {
    "own rows": {},
    "normed residual": {"norm_before_residual": True},
    "rows of the target": {"shared": True},
    "all": {"predicted": 131},
}


def head_in(folder: Path, predicted: int = 40, shared: bool = False, **fields: Any) -> tuple[Path, Path]:
    """A random head, and its target; `shared`: its rows are those of the target's embedding."""
    target = heads.target(folder / "target", tie_word_embeddings=True)
    head = tiny.edit(heads.head(folder / "head", predicted), **fields)
    if shared:
        tensors = load_file(head / "model.safetensors")
        del tensors[OUTPUTS]
        save_file(tensors, head / "model.safetensors")
    return head, target


@pytest.mark.skipif(not OURS, reason="no products on this processor: layers have many calls")
@pytest.mark.parametrize("law", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("int8", [False, True], ids=["fp32", "int8"])
@pytest.mark.parametrize("case", HEADS)
def test_one_call_of_a_head_says_what_single_calls_do(case: str, int8: bool, law: Law, tmp_path: Path) -> None:
    directory, target = head_in(tmp_path, **HEADS[case])
    features = Features(kind="eagle3", layers=heads.LAYERS, width=heads.WIDTH)
    found = []
    calls: list[int] = []
    for once in (True, False):
        runner = load(directory, torch.float32, int8, target)
        draft = Draft(pair.config(settings().speculation, features=features), runner)
        if once:
            steps_of(draft.engine.drafter, calls)
        else:
            draft.engine.drafter._step = None
        found.append(played(draft, law))
        assert draft.forwards > 30
    assert found[0] == found[1] and len(calls) >= draft.forwards - 1
    said = {token for part in found[0][::2] for guess in part for token in guess.candidates}
    ids = runner.model.head.ids
    unlisted = said - set(range(VOCABULARY) if ids is None else ids.tolist())
    assert bool(unlisted) == (case == "rows of the target")


BLOCKS: dict[str, dict[str, Any]] = {
    "few ids": {"predicted": 40, "layout": "specforge", "is_causal": True, "draft_vocab_size": 40},
    "all": {"layout": "dspark", "is_causal": True},
    "no first-order head": {
        "predicted": 40,
        "layout": "dflash",
        "sample_from_anchor": True,
        "is_causal": True,
        "draft_vocab_size": 40,
    },
}


@pytest.mark.skipif(not OURS, reason="no products on this processor: layers have many calls")
@pytest.mark.parametrize("law", [GREEDY, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("int8", [False, True], ids=["fp32", "int8"])
@pytest.mark.parametrize("case", BLOCKS)
def test_one_call_of_a_block_drafter_says_what_single_calls_do(case: str, int8: bool, law: Law, tmp_path: Path) -> None:
    """Guesses in one call, then one after the other behind all layers in one call, then from single calls alone."""
    target = heads.target(tmp_path / "target", tie_word_embeddings=True)
    directory, width = blocks.block(tmp_path / "draft", **BLOCKS[case]), len(blocks.LAYERS) * tiny.SIZES["hidden_size"]
    features = Features(kind="block", layers=blocks.LAYERS, width=width)
    found = []
    calls: list[int] = []
    for way in ("one call", "layers", "single calls"):
        runner = load(directory, torch.float32, int8, target)
        draft = Draft(pair.config(settings().speculation, features=features), runner)
        if way == "one call":
            steps_of(draft.engine.drafter, calls)
        else:
            draft.engine.drafter._step = None
        if way == "single calls":
            runner.model._decoder = None
        found.append(played(draft, law))
    assert found[0] == found[1] == found[2] and len(calls) > 12
    guesses = [guess for part in found[0][::2] for guess in part]
    ids = runner.model.head.ids
    unlisted = {token for guess in guesses for token in guess.candidates}
    unlisted -= set(range(VOCABULARY) if ids is None else ids.tolist())
    assert bool(unlisted) == (case != "all") and len({guess.token for guess in guesses}) > 20
