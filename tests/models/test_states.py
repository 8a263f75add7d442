"""Families whose layers have states, in every way their text may be cut, against transformers' own forward."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ssd.errors import UsageError
from ssd.models import registry
from ssd.models.checkpoint import inspect
from ssd.models.interface import Model
from tests.models import tiny
from tests.models.knobs import DELTA, FULL, QWEN3_5, QWEN3_5_MOE, RECURRENT
from tests.models.states import StatesContext, forward
from tests.ranks import part, side_by_side

TEXT = tiny.token_ids(90, 0)
OTHER = tiny.token_ids(33, 3)
TOLERANCE = 3e-4  # processors round float32 differently: 1.31e-4 on a Xeon with AMX


@pytest.fixture(scope="module", params=RECURRENT)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Tensor, Tensor]:
    return made(*RECURRENT[request.param], tmp_path_factory.mktemp("model"))


def made(kind: str, knobs: dict[str, Any], folder: Path) -> tuple[Model, Tensor, Tensor]:
    """Return a model of ours, and transformers' logits for both texts."""
    directory = tiny.model(kind, folder, **knobs)
    oracle = tiny.oracle(directory)
    model = registry.load(inspect(directory), torch.float32, tiny.CPU, tiny.MAX_POSITION)
    return model, tiny.oracle_logits(oracle, TEXT), tiny.oracle_logits(oracle, OTHER)


def near(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and bool((found - expected).abs().max() <= TOLERANCE)


def test_whole_text(pair: tuple[Model, Tensor, Tensor]) -> None:
    model, expected, _ = pair
    assert near(forward(model, StatesContext(model, 1), (0, 0, TEXT)), expected)


@pytest.mark.parametrize("sizes", [[1], [40, 1, 7, 1, 1, 40], [2, 3, 5, 31]])
def test_chunks_and_single_tokens(pair: tuple[Model, Tensor, Tensor], sizes: list[int]) -> None:
    model, expected, _ = pair
    context, logits, start = StatesContext(model, 1), [], 0
    while start < len(TEXT):
        chunk = TEXT[start : start + sizes[len(logits) % len(sizes)]]
        logits.append(forward(model, context, (0, start, chunk)))
        start += len(chunk)
    assert near(torch.cat(logits), expected)


def test_rejected_tokens_leave_no_trace(pair: tuple[Model, Tensor, Tensor]) -> None:
    model, expected, other = pair
    context, wrong = StatesContext(model, 2), [token + 1 for token in TEXT if token < 130]
    found = [forward(model, context, (0, 0, TEXT[:20]), (1, 0, OTHER[:9]))]
    for start in range(20, 30):
        logits = forward(model, context, (0, start, [TEXT[start], *wrong[:4]]), (1, start - 11, [OTHER[start - 11]]))
        found += [logits[:1], logits[-1:]]
    assert near(torch.cat((found[0][:20], *found[1::2])), expected[:30])
    assert near(torch.cat((found[0][20:], *found[2::2])), other[:19])


def test_hidden_states_are_shown_after_every_layer(pair: tuple[Model, Tensor, Tensor]) -> None:
    model, _, _ = pair
    context = StatesContext(model, 1)
    forward(model, context, (0, 0, TEXT[:5]))
    assert sorted(context.hidden) == list(range(len(context.hidden))) and len(context.hidden) > model.shape.layers


def loaded(directory: Path, **fields: Any) -> Model:
    return registry.load(inspect(tiny.edit(directory, **fields)), torch.float32, tiny.CPU, tiny.MAX_POSITION)


def logits_of(model: Model) -> Tensor:
    return forward(model, StatesContext(model, 1), (0, 0, TEXT))


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_part_of_a_model_with_a_vision_tower(kind: str, tmp_path: Path) -> None:
    """With its MTP layers, which are left alone. Its experts are stacked, as in published checkpoints."""
    import transformers

    prefix = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[kind]
    text = {name: size for name, size in tiny.SIZES.items() if name != "tie_word_embeddings"} | QWEN3_5_MOE
    vision = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
    config = getattr(transformers, f"{prefix}Config")(text_config=text, vision_config=vision, tie_word_embeddings=True)
    whole = getattr(transformers, f"{prefix}ForConditionalGeneration")
    directory = tiny._write(whole(config).float(), tmp_path, 0, 0.1, False)
    oracle = whole.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    tensors = load_file(directory / "model.safetensors")
    assert any(name.startswith("model.visual.") for name in tensors) and "lm_head.weight" not in tensors
    moe = kind == "qwen3_5_moe"
    stack = "model.language_model.layers.0.mlp.experts.{}_proj"
    if moe and stack.format("down") not in tensors:
        tensors = stacked(tensors)
    assert not moe or tensors[stack.format("gate_up")].shape == (6, 2 * QWEN3_5_MOE["moe_intermediate_size"], 32)
    save_file(tensors | {"mtp.norm.weight": torch.ones(32)}, directory / "model.safetensors")
    assert near(logits_of(loaded(directory)), tiny.oracle_logits(oracle, TEXT))


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint with those of the experts in a layer stacked."""
    expert = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
    found = {name: tensor for name, tensor in tensors.items() if not expert.fullmatch(name)}
    for prefix in {match[1] for match in map(expert.fullmatch, tensors) if match}:
        gate, up, down = (
            torch.stack([tensors[f"{prefix}.{index}.{part}_proj.weight"] for index in range(6)])
            for part in ("gate", "up", "down")
        )
        found |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), dim=1), f"{prefix}.down_proj": down}
    return found


@pytest.mark.parametrize("kind", ["qwen3_5_moe_text", "qwen3_next"])
def test_experts_may_be_stacked_or_apart(kind: str, tmp_path: Path) -> None:
    directory = tiny.model(kind, tmp_path, **QWEN3_5_MOE)
    tensors = load_file(directory / "model.safetensors")
    apart = logits_of(loaded(directory))
    assert sum(".experts.5.up_proj" in name for name in tensors) == 4
    save_file(stacked(tensors), directory / "model.safetensors")
    assert torch.equal(logits_of(loaded(directory)), apart)


@pytest.mark.parametrize(
    ("kind", "knobs", "old"),
    [
        (
            "qwen3_5_text",
            QWEN3_5 | {"layer_types": [DELTA, FULL] * 2},
            {"layer_types": None, "full_attention_interval": 2},
        ),
        (
            "qwen3_next",
            QWEN3_5_MOE | {"layer_types": [DELTA, DELTA, DELTA, FULL], "rope_parameters": None},
            {"layer_types": None, "rope_parameters": None, "rope_theta": 10000.0, "partial_rotary_factor": None},
        ),
    ],
)
def test_old_configs_describe_the_same_model(
    kind: str, knobs: dict[str, Any], old: dict[str, Any], tmp_path: Path
) -> None:
    check_old(tiny.model(kind, tmp_path, **knobs), old)


def check_old(directory: Path, old: dict[str, Any]) -> None:
    new = logits_of(loaded(directory))
    assert torch.equal(logits_of(loaded(directory, **old)), new)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate false is not supported"),
        ("qwen3_5_text", {"layer_types": [FULL, FULL, DELTA, "conv"]}, "layer_types must be 4 of"),
        ("qwen3_5_text", {"layer_types": [DELTA] * 4}, "at least one of them full_attention"),
        ("qwen3_5_text", {"linear_num_value_heads": 5}, "5 are no multiple of 2 key heads"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim must be above 1"),
        ("qwen3_5_text", {"linear_conv_kernel_dim": 65}, "linear_conv_kernel_dim must not be above 64"),
        ("qwen3_5_text", {"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        ("qwen3_5_text", {"sliding_window": 4}, "sliding_window is not supported"),
        ("qwen3_5_moe_text", {"mlp_only_layers": [1]}, "mlp_only_layers is not supported"),
    ],
)
def test_what_is_not_computed_is_refused(kind: str, fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    check_not_computed(tiny.model(kind, tmp_path, **RECURRENT[kind][1]), fields, message)


def check_not_computed(directory: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        loaded(directory, **fields)


def test_layers_with_a_state_are_not_split(tmp_path: Path) -> None:
    directory = tiny.model("qwen3_5_text", tmp_path, **QWEN3_5)
    with pytest.raises(UsageError, match="not split over ranks: use --tensor-parallel-size 1"):
        side_by_side(2, lambda ranks: part(directory, ranks))


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in RECURRENT.values()}))
def test_dummy_weights_need_no_tensors(kind: str, tmp_path: Path) -> None:
    check_dummy(tiny.model(kind, tmp_path, **RECURRENT[kind][1]))


def check_dummy(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    checkpoint = inspect(directory, weights=False)
    one, two = (
        logits_of(registry.load(checkpoint, torch.float32, tiny.CPU, tiny.MAX_POSITION, dummy=True)) for _ in range(2)
    )
    assert torch.equal(one, two) and one.isfinite().all() and one.std() > 0
