"""Rotary positions against transformers, for every scaling that is supported."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ssd.errors import UsageError
from ssd.layers.rotary import Rotary, inverse_frequencies

pytestmark = pytest.mark.usefixtures("either_way")

HEAD_DIM, LENGTH = 64, 4096
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "large theta": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": LLAMA3 | {"rope_theta": 500000.0},
}


@pytest.fixture(params=PARAMETERS)
def parameters(request: pytest.FixtureRequest) -> dict[str, Any]:
    return PARAMETERS[request.param]


def theirs(parameters: dict[str, Any]) -> Any:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        head_dim=HEAD_DIM, max_position_embeddings=LENGTH, rope_parameters=dict(parameters), num_attention_heads=4
    )
    return LlamaRotaryEmbedding(config)


def test_frequencies(parameters: dict[str, Any]) -> None:
    ours = inverse_frequencies(HEAD_DIM, {"rope_parameters": parameters})
    assert ours.dtype == torch.float32
    assert (ours / theirs(parameters).inv_freq - 1).abs().max() <= 1e-6


def test_rotation(parameters: dict[str, Any]) -> None:
    """At every position: a late angle is off by some 1e-4 in float32, and must be off in the same way."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(LENGTH, 3, HEAD_DIM, generator=generator)
    positions = torch.arange(LENGTH)
    rotary = Rotary(inverse_frequencies(HEAD_DIM, {"rope_parameters": parameters}), LENGTH, torch.float32)
    cos, sin = theirs(parameters)(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x, x, cos[0], sin[0], unsqueeze_dim=1)
    assert (rotary(x, rotary.at(positions)) - expected).abs().max() <= 1e-6


def test_positions_in_any_order() -> None:
    rotary = Rotary(inverse_frequencies(8, {}), 50, torch.float32)
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    some = rotary(x, rotary.at(torch.tensor([7, 0, 49])))
    for row, position in enumerate((7, 0, 49)):
        assert torch.equal(some[row : row + 1], rotary(x[row : row + 1], rotary.at(torch.tensor([position]))))
    assert torch.equal(some[1], x[1])


def test_scores_depend_on_distance_alone() -> None:
    """What the embedding is for (arXiv 2104.09864, section 3.2.2)."""
    rotary = Rotary(inverse_frequencies(16, {}), 200, torch.float64)
    q, k = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def score(query_at: int, key_at: int) -> float:
        q_at, k_at = (rotary.at(torch.tensor([position])) for position in (query_at, key_at))
        return (rotary(q, q_at) * rotary(k, k_at)).sum().item()

    assert score(5, 2) == pytest.approx(score(190, 187), abs=1e-4)
    assert score(5, 2) != pytest.approx(score(5, 4), abs=1e-2)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 500.0},
        {"rope_theta": 500.0, "rope_scaling": None},
        {"rope_scaling": {"rope_theta": 500.0, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 500.0}},
    ],
    ids=str,
)
def test_theta_is_found_wherever_a_config_keeps_it(config: dict[str, Any]) -> None:
    expected = inverse_frequencies(HEAD_DIM, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}})
    assert torch.equal(inverse_frequencies(HEAD_DIM, config), expected)


def test_an_unknown_scaling_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"yarn.*default, linear, llama3"):
        inverse_frequencies(HEAD_DIM, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
