"""Configs as people and other tools write them: read as transformers reads them, or refused, never another way.

A config that is taken for another computes text that is almost right, which no other test would see.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.models.checkpoint import inspect, stop_token_ids
from tests.models import tiny
from tests.models.knobs import FAMILIES, FULL, LLAMA3, SLIDING, THETA

LLAMAS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


def model(kind: str, directory: Path, **options: Any) -> Path:
    return tiny.model(kind, directory, **FAMILIES[kind][1] | options)


def rewritten(directory: Path, fields: dict[str, Any], without: Collection[str] = ()) -> Path:
    """With other fields in its config, and some left out."""
    file = directory / "config.json"
    kept = {name: value for name, value in json.loads(file.read_text()).items() if name not in without}
    file.write_text(json.dumps(kept | fields))
    return directory


def logits(directory: Path, text: list[int]) -> Tensor:
    return tiny.runner(directory).forward([Row(text, 0, range(16), len(text))])


def assert_as_transformers(directory: Path) -> None:
    text = tiny.token_ids(60, 0)
    assert (logits(directory, text) - tiny.oracle_logits(tiny.oracle(directory), text)).abs().max() <= 1e-4


@pytest.mark.parametrize("kind", LLAMAS)
@pytest.mark.parametrize("same", [False, True])
def test_a_table_of_its_own_is_not_tied_whatever_the_config_says(kind: str, same: bool, tmp_path: Path) -> None:
    """As fine-tunes have it that were untied and kept their config, and files that keep a tied table twice."""
    check_untied(model(kind, tmp_path, tie_word_embeddings=False), same)


def check_untied(directory: Path, same: bool) -> None:
    tiny.edit(directory, tie_word_embeddings=True)
    if same:
        tensors = load_file(directory / "model.safetensors")
        embedding = next(
            tensor for name, tensor in tensors.items() if name.endswith(("embed_tokens.weight", "wte.weight"))
        )
        save_file(tensors | {"lm_head.weight": embedding.clone()}, directory / "model.safetensors")
    assert_as_transformers(directory)


READ: dict[str, tuple[str, dict[str, Any], Collection[str]]] = {
    "a window without a switch": ("qwen2", {"sliding_window": 5}, ("use_sliding_window", "layer_types")),
    "the same of qwen3": ("qwen3", {"sliding_window": 5}, ("use_sliding_window", "layer_types")),
    "the same of experts": ("qwen3_moe", {"sliding_window": 5}, ("use_sliding_window",)),
    "a window in all layers": (
        "qwen2",
        {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0},
        ("layer_types",),
    ),
    "a window above what is left out": (
        "qwen2",
        {"sliding_window": 5, "use_sliding_window": True},
        ("layer_types", "max_window_layers"),
    ),
    "trained length beside the scaling": (
        "llama",
        {"rope_parameters": THETA | LLAMA3, "original_max_position_embeddings": 32},
        (),
    ),
    "theta beside its parameters": ("llama", {"rope_theta": 50.0}, ()),
    "nulls": ("llama", {"attention_bias": None, "head_dim": None, "rope_scaling": None, "auto_map": None}, ()),
}


@pytest.mark.parametrize("case", READ)
def test_what_is_left_out_means_what_it_means_to_transformers(case: str, tmp_path: Path) -> None:
    kind, fields, without = READ[case]
    directory = rewritten(model(kind, tmp_path), fields, without)
    if case != "nulls":  # which transformers refuses
        assert_as_transformers(directory)
    assert logits(directory, [1, 2]).isfinite().all()


def test_a_mistral_without_a_window_has_the_one_of_the_first_mistral(tmp_path: Path) -> None:
    runner = tiny.runner(rewritten(model("mistral", tmp_path), {}, ["sliding_window"]))
    layers: Any = runner.model
    assert layers._layers[0]._attention._scores.window == 4096


LINEAR = {"rope_type": "linear", "factor": 4.0}
SCALED = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((kind, {"is_causal": False}, "is_causal must be true") for kind in LLAMAS),
    *((kind, {"rope_scaling": LINEAR}, "contradict each other") for kind in LLAMAS),
    *((kind, {"rope_parameters": {FULL: LINEAR}}, "differ by kind of layer") for kind in LLAMAS),
    ("llama", {"rope_parameters": LINEAR | {"factor": 0}}, "factor must be a positive number, is 0"),
    ("llama", {"rope_parameters": LINEAR | {"factor": "4"}}, "factor must be a positive number, is '4'"),
    ("llama", {"rope_parameters": {"rope_theta": -1}}, "rope_theta must be a positive number, is -1"),
    ("llama", {"rope_parameters": [["rope_type", "linear"]]}, "rope_parameters must be an object"),
    ("llama", {"rope_parameters": {"rope_type": 7}}, "rope scaling 7 is not supported"),
    (
        "llama",
        {"rope_parameters": SCALED | {"low_freq_factor": 4, "high_freq_factor": 4}},
        "low_freq_factor 4.0 is not",
    ),
    ("mistral", {"sliding_window": 5, "use_sliding_window": False}, "windows in some of the layers"),
    ("mistral", {"sliding_window": 5, "layer_types": [SLIDING, FULL]}, "windows in some of the layers"),
    ("mistral", {"attention_bias": True}, "attention_bias is not supported"),
    *((kind, {"mlp_bias": True}, "mlp_bias is not supported") for kind in ("mistral", "qwen2", "qwen3", "qwen3_moe")),
    ("qwen2", {"sliding_window": 5, "use_sliding_window": False, "layer_types": [SLIDING, FULL]}, "no sliding_window"),
    (
        "qwen3_moe",
        {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 9},
        "sliding-window attention",
    ),
    ("llama", {"attention_bias": "false"}, "attention_bias must be true or false, is 'false'"),
    ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
    ("qwen3_moe", {"norm_topk_prob": "false"}, "norm_topk_prob must be true or false"),
    ("qwen3_moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers must be a list of layers"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step must be a positive number"),
    ("llama", {"rms_norm_eps": -1e-5}, "rms_norm_eps must be a positive number"),
    ("llama", {"compression_config": {"quant_method": "compressed-tensors"}}, "quantised weights"),
]


@pytest.mark.parametrize(("kind", "fields", "message"), REFUSED, ids=str)
def test_what_would_be_computed_another_way_is_refused(
    kind: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    check_refused(tiny.edit(model(kind, tmp_path), **fields), message)


def check_refused(directory: Path, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        tiny.runner(directory)
    assert str(directory) in str(caught.value) and len(str(caught.value)) < 400


# -- weights ----------------------------------------------------------------------------------------------------------


NO_NUMBERS = pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8, torch.bool])


@NO_NUMBERS
def test_weights_that_are_numbers_only_with_their_scales_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    check_unscaled(tiny.llama(tmp_path), dtype)


def check_unscaled(directory: Path, dtype: torch.dtype) -> None:
    """As quantised checkpoints have them whose config does not say so: of the same names and shapes."""
    file = directory / "model.safetensors"
    quantised = {name: tensor.to(dtype) if tensor.ndim == 2 else tensor for name, tensor in load_file(file).items()}
    save_file(quantised, file, metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"tensor .*\.weight has type \w+: quantised weights are not read"):
        tiny.runner(directory)


# -- ends -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [True, -1, [2, -1], 2.0, "2", [[2]], {}, [True]])
def test_ends_that_are_no_ids_are_refused(ids: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"eos_token_id .* is neither a number nor a list of numbers"):
        stop_token_ids(inspect(tiny.edit(tiny.llama(tmp_path), eos_token_id=ids)))


def test_ends_beyond_the_vocabulary_are_no_ends(tmp_path: Path) -> None:
    directory = tiny.edit(tiny.llama(tmp_path), eos_token_id=[7, 131])
    (directory / "generation_config.json").unlink()
    assert stop_token_ids(inspect(directory)) == {7}
    with pytest.raises(UsageError, match=r"eos_token_id \[131\] is not in the vocabulary of 131 tokens"):
        stop_token_ids(inspect(tiny.edit(directory, eos_token_id=131)))
