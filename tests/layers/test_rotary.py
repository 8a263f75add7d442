"""Rotary positions against transformers, for every scaling that is supported."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ssd.errors import UsageError
from ssd.layers.rotary import Frequencies, Rotary, frequencies

pytestmark = pytest.mark.usefixtures("either_way")

HEAD_DIM, LENGTH = 64, 4096
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1 + 0.01 * pair for pair in range(HEAD_DIM // 2)],
    "long_factor": [1 + 0.3 * pair for pair in range(HEAD_DIM // 2)],
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "large theta": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": LLAMA3 | {"rope_theta": 500000.0},
    "yarn": YARN,
    "yarn, its own betas, not truncated": YARN | {"beta_fast": 20.0, "beta_slow": 2.0, "truncate": False},
    "yarn, attention factor": YARN | {"attention_factor": 0.7},
    "yarn, DeepSeek's attention factor": YARN | {"mscale": 0.8, "mscale_all_dim": 1.3},
    "yarn, factor by lengths": YARN | {"factor": None, "original_max_position_embeddings": 512},
    "yarn, nothing stretched": YARN | {"factor": 1.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "longrope, short": LONGROPE | {"original_max_position_embeddings": LENGTH},
    "longrope, long": LONGROPE | {"original_max_position_embeddings": 512},
    "longrope, attention factor": LONGROPE | {"original_max_position_embeddings": 512, "attention_factor": 1.5},
    "longrope, factor": LONGROPE | {"original_max_position_embeddings": 512, "factor": 3.0},
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


def of(parameters: dict[str, Any], length: int = LENGTH) -> Frequencies:
    return frequencies(HEAD_DIM, {"rope_parameters": parameters, "max_position_embeddings": LENGTH}, length)


def test_frequencies(parameters: dict[str, Any]) -> None:
    ours, expected = of(parameters), theirs(parameters)
    expected(torch.zeros(1), torch.arange(LENGTH)[None])  # some change by the longest position of a forward
    assert ours.inverse.dtype == torch.float32
    assert (ours.inverse / expected.inv_freq - 1).abs().max() <= 1e-6
    assert ours.attention_factor == pytest.approx(expected.attention_scaling, rel=1e-6)


def test_rotation(parameters: dict[str, Any]) -> None:
    """At every position: a late angle is off by some 1e-4 in float32, and must be off in the same way."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(LENGTH, 3, HEAD_DIM, generator=generator)
    positions = torch.arange(LENGTH)
    rotary = Rotary(of(parameters), LENGTH, torch.float32)
    cos, sin = theirs(parameters)(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x, x, cos[0], sin[0], unsqueeze_dim=1)
    assert (rotary(x, rotary.at(positions)) - expected).abs().max() <= 1e-6


def test_positions_in_any_order() -> None:
    rotary = Rotary(frequencies(8, {}, 50), 50, torch.float32)
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    some = rotary(x, rotary.at(torch.tensor([7, 0, 49])))
    for row, position in enumerate((7, 0, 49)):
        assert torch.equal(some[row : row + 1], rotary(x[row : row + 1], rotary.at(torch.tensor([position]))))
    assert torch.equal(some[1], x[1])


def test_scores_depend_on_distance_alone() -> None:
    """What the embedding is for (arXiv 2104.09864, section 3.2.2)."""
    rotary = Rotary(frequencies(16, {}, 200), 200, torch.float64)
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
    expected = of({"rope_type": "default", "rope_theta": 500.0})
    assert torch.equal(frequencies(HEAD_DIM, config, LENGTH).inverse, expected.inverse)


def test_an_unknown_scaling_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"su.*default, linear, dynamic, yarn, longrope, llama3"):
        frequencies(HEAD_DIM, {"rope_scaling": {"rope_type": "su", "factor": 4.0}}, LENGTH)


def test_scalings_that_depend_on_length_go_by_the_longest_sequence_that_is_served() -> None:
    """Keys in the cache cannot be rotated again: what transformers changes as a text grows is decided at the start."""
    long = LONGROPE | {"original_max_position_embeddings": 512}
    short = of(LONGROPE | {"original_max_position_embeddings": LENGTH})
    assert torch.equal(of(long, 512).inverse, short.inverse) and not torch.equal(of(long, 513).inverse, short.inverse)
    assert of(long, 512).attention_factor == of(long).attention_factor > 1
    dynamic = PARAMETERS["dynamic"]
    plain = of({"rope_type": "default", "rope_theta": 10000.0}).inverse
    assert torch.equal(of(dynamic, 100).inverse, plain) and torch.equal(of(dynamic, LENGTH).inverse, plain)
    beyond = theirs(dynamic)
    beyond(torch.zeros(1), torch.arange(2 * LENGTH)[None])
    assert (of(dynamic, 2 * LENGTH).inverse / beyond.inv_freq - 1).abs().max() <= 1e-6


def test_frequency_factors_divide() -> None:
    """As `rope_freqs.weight` of a GGUF."""
    factors = [1.0 + pair for pair in range(HEAD_DIM // 2)]
    divided = of({"frequency_factors": factors}).inverse
    assert torch.equal(divided, of({}).inverse / torch.tensor(factors))


def test_partly_rotated_heads() -> None:
    """The first numbers are rotated as a smaller head is; the others stay."""
    config = {"partial_rotary_factor": 0.75}
    whole, part = frequencies(48, {}, 50), frequencies(HEAD_DIM, config, 50, partly=True)
    x, positions = torch.randn(50, 3, HEAD_DIM, generator=torch.Generator().manual_seed(0)), torch.arange(50)
    small, rotary = (Rotary(some, 50, torch.float32) for some in (whole, part))
    turned = rotary(x, rotary.at(positions))
    assert torch.equal(turned[..., :48], small(x[..., :48].contiguous(), small.at(positions)))
    assert torch.equal(turned[..., 48:], x[..., 48:])


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (LONGROPE | {"long_factor": [1.0]}, "long_factor must be a list of 32 numbers"),
        (LONGROPE | {"short_factor": [1.0] * 31 + ["2"]}, "short_factor must be a positive number, is '2'"),
        (LONGROPE | {"original_max_position_embeddings": 1}, "must be above 1 without an attention_factor"),
        (YARN | {"truncate": "false"}, "truncate must be true or false"),
        (YARN | {"factor": -1}, "factor must be a positive number"),
        (YARN | {"frequency_factors": [1.0] * 32}, "frequency_factors are not supported beside"),
        ({"frequency_factors": [1.0] * 31}, "frequency_factors must be a list of 32 numbers"),
        ({"rope_type": "dynamic"}, "factor must be a positive number"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported in this family"),
    ],
    ids=str,
)
def test_what_a_scaling_lacks_is_named(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        of(parameters)


@pytest.mark.parametrize("part", [0.0, 0.01, 0.7, 1.5])
def test_heads_that_cannot_be_rotated_in_pairs(part: float) -> None:
    with pytest.raises(UsageError, match=r"rotated in pairs|partial_rotary_factor"):
        frequencies(30, {"partial_rotary_factor": part}, LENGTH, partly=True)
