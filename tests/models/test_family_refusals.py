"""What a family cannot do is refused, by name: an option that is ignored gives text that is almost right."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from ssd.errors import UsageError
from ssd.models import registry
from tests.models import tiny
from tests.models.knobs import FAMILIES


def refusal(directory: Path) -> str:
    with pytest.raises(UsageError) as caught:
        tiny.runner(directory)
    return str(caught.value)


def test_unknown_activation(tmp_path: Path) -> None:
    assert "gelu" in refusal(tiny.llama(tmp_path, hidden_act="gelu"))


@pytest.mark.parametrize("kind", ["su", "proportional"])
@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_unknown_rope_scaling(tmp_path: Path, kind: str, field: str) -> None:
    """In the fields of new and of old configs; a scaling that is ignored gives text that is wrong only when long."""
    directory = tiny.edit(tiny.llama(tmp_path), rope_parameters=None)
    assert repr(kind) in refusal(tiny.edit(directory, **{field: {"type": kind, "factor": 2.0}}))


def test_missing_tensor(tmp_path: Path) -> None:
    file = tiny.llama(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    assert "model.layers.1.mlp.up_proj.weight is missing" in refusal(tmp_path)


def test_missing_bias(tmp_path: Path) -> None:
    assert "self_attn.q_proj.bias is missing" in refusal(tiny.edit(tiny.llama(tmp_path), attention_bias=True))


def test_wrong_shape(tmp_path: Path) -> None:
    message = refusal(tiny.edit(tiny.llama(tmp_path), num_key_value_heads=4))
    assert "self_attn.k_proj.weight has shape (16, 32), expected (32, 32)" in message


def test_missing_number(tmp_path: Path) -> None:
    directory = tiny.llama(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    del config["num_attention_heads"]
    (directory / "config.json").write_text(json.dumps(config))
    assert "num_attention_heads" in refusal(directory)


def test_llama_with_a_sliding_window(tmp_path: Path) -> None:
    """Mistral's field: there is no switch beside it."""
    assert "mistral" in refusal(tiny.edit(tiny.llama(tmp_path), sliding_window=16))


def test_quantised_weights(tmp_path: Path) -> None:
    """Some keep the names and shapes of the tensors, and their scales beside them: read as they are, they are noise."""
    assert "quantised" in refusal(tiny.edit(tiny.llama(tmp_path), quantization_config={"quant_method": "quanto"}))


def test_window_that_is_switched_off_is_accepted(tmp_path: Path) -> None:
    """As the configs of Qwen2.5 and of early Qwen3 have it."""
    directory = tiny.edit(tiny.qwen3(tmp_path), use_sliding_window=False, sliding_window=16, layer_types=None)
    assert tiny.runner(directory).model.shape.layers == 2


def test_unknown_family_names_the_known_ones(tmp_path: Path) -> None:
    message = refusal(tiny.edit(tiny.llama(tmp_path), model_type="mamba"))
    assert all(word in message for word in ("mamba", "llama", "qwen3", str(tmp_path)))


def test_without_a_fallback_the_message_says_that_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "fallback", lambda: None)
    message = refusal(tiny.edit(tiny.llama(tmp_path), model_type="warp"))
    assert "'warp' is not supported (known: " in message and "nothing that is installed runs others" in message


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("mistral", {"sliding_window": -4}, "sliding_window must be a positive number"),
        ("mistral", {"sliding_window": 8.5}, "sliding_window must be a positive number"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types has 1 layers, num_hidden_layers says 2"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "sliding-window"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok 7 of 6"),
        ("qwen3_moe", {"num_local_experts": 7}, r"experts.6.gate_proj.weight is missing|gate.weight has shape"),
        ("llama", {"text_config": {"vocab_size": 131}}, "several modalities"),
    ],
    ids=str,
)
def test_what_a_family_cannot_do_is_refused_by_name(
    family: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    check_refused(*FAMILIES[family], fields, message, tmp_path)


def check_refused(kind: str, knobs: dict[str, Any], fields: dict[str, Any], message: str, folder: Path) -> None:
    assert re.search(message, refusal(tiny.edit(tiny.model(kind, folder, **knobs), **fields)))


def test_the_families_are_found_through_entry_points() -> None:
    known = registry.families()
    assert {known[kind] for kind, _ in FAMILIES.values()} == {"built in"}
