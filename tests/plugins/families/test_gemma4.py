"""Gemma 4's config in its several forms, the memory of layers of two sizes, and a model with its towers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ssd.draft.chain_cache import ChainCache
from ssd.execution.batch import Row
from ssd.execution.kv_cache import KVCache
from ssd.execution.runner import attention_backend
from ssd.execution.tables import table_context
from ssd.models.checkpoint import inspect
from ssd.models.sizes import ModelSizes
from tests.models import knobs, tiny
from tests.models.knobs import FULL
from tests.plugins.families.knobs import FAMILIES, GEMMA4

TEXT = tiny.token_ids(60, 0)
ROWS = [Row(TEXT, 0, range(64), outputs=len(TEXT))]


def rewritten(directory: Path, **fields: Any) -> Path:
    """Give a checkpoint the fields of Google's config in place of transformers' `per_layer_config`."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    del config["per_layer_config"]
    file.write_text(json.dumps(config | fields))
    return directory


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gemma4_text", {"global_head_dim": 12}),
        ("gemma4_text keys as values", {"global_head_dim": 12, "num_global_key_value_heads": 1}),
        ("gemma4_text", {"global_head_dim": 12, "num_global_key_value_heads": 1}),  # counts with attention_k_eq_v only
    ],
)
def test_sizes_may_be_named_by_kind_of_layer(family: str, fields: dict[str, Any], tmp_path: Path) -> None:
    directory = tiny.model("gemma4_text", tmp_path, **FAMILIES[family][1])
    expected = tiny.runner(directory).forward(ROWS)
    assert torch.equal(tiny.runner(rewritten(directory, **fields)).forward(ROWS), expected)


@pytest.mark.parametrize("family", ["llama", "gemma4_text", "gemma4_text of one size", "gemma4_text keys as values"])
def test_the_memory_is_that_of_each_layers_own_size(family: str, tmp_path: Path) -> None:
    """Of layers that store keys and values, and no others; planned by the config alone."""
    kind, options = (knobs.FAMILIES | FAMILIES)[family]
    directory = tiny.model(kind, tmp_path, **options)
    sizes, shape = ModelSizes.of(inspect(directory)), tiny.runner(directory).model.shape
    expected = {
        "llama": 2 * 2 * 16,
        "gemma4_text": 2 * (2 * 16 + 24),
        "gemma4_text of one size": 2 * 6 * 16,
        "gemma4_text keys as values": 2 * (2 * 16 + 12),
    }[family]
    assert sizes.kv_values_per_token == expected
    for dtype, more in ((torch.float32, 0), (torch.int8, 4 * sizes.kv_cells_per_token)):
        cache = KVCache(shape, 5, 4, dtype, tiny.CPU)
        assert cache.keys.nbytes + cache.values.nbytes == 5 * 4 * (expected * dtype.itemsize + more)
        assert len(cache.layers) == shape.layers
    chains = ChainCache.new(shape, 3, 2, torch.float32, tiny.CPU)
    assert sum(kind.numel() for layer in chains.layers for kind in layer) == 3 * 2 * expected


def test_a_promoted_chain_is_in_the_pages_of_each_layer(tmp_path: Path) -> None:
    shape = tiny.runner(tiny.model("gemma4_text", tmp_path, **GEMMA4)).model.shape
    cache, chains = KVCache(shape, 5, 4, torch.float32, tiny.CPU), ChainCache.new(shape, 3, 2, torch.float32, tiny.CPU)
    cache.blank(range(5))
    for index, layer in enumerate(chains.layers):
        for kind in layer:
            kind[1] = index + 1
    chains.promote(1, 2, cache, [9, 3])
    for index, layer in enumerate(cache.layers):
        for kind in layer:
            assert (kind[[9, 3]] == index + 1).all() and kind.count_nonzero() == 2 * kind[0].numel()


@pytest.mark.parametrize("attention", ["torch", "triton"])
def test_backends_of_pages_read_layers_of_two_sizes(attention: str, tmp_path: Path) -> None:
    runner = tiny.runner(tiny.model("gemma4_text", tmp_path, **GEMMA4))
    expected = runner.forward(ROWS)
    context = table_context(ROWS, runner.cache, attention_backend(attention, tiny.CPU, 4), 64)
    assert (runner.run(TEXT, context, range(len(TEXT))) - expected).abs().max() <= 1e-4


def test_the_text_part_of_a_model_with_towers(tmp_path: Path) -> None:
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = small | {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16}
    text = {name: value for name, value in tiny.SIZES.items() if name != "tie_word_embeddings"} | GEMMA4
    config = Gemma4Config(text_config=text | {"use_bidirectional_attention": "vision"}, vision_config=vision)
    directory = tiny._write(Gemma4ForConditionalGeneration(config).float(), tmp_path, 0, 0.2, False)
    oracle = Gemma4ForConditionalGeneration.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    expected = tiny.oracle_logits(oracle.eval(), TEXT)
    assert inspect(directory).config["model_type"] == "gemma4_text"
    assert (tiny.runner(directory).forward(ROWS) - expected).abs().max() <= 1e-4


def test_rotations_that_no_config_names_are_the_first_models(tmp_path: Path) -> None:
    directory = tiny.model("gemma4_text", tmp_path, **GEMMA4)
    expected = tiny.runner(directory).forward(ROWS)
    for told in (None, {FULL: None}):
        assert torch.equal(tiny.runner(tiny.edit(directory, rope_parameters=told)).forward(ROWS), expected)
