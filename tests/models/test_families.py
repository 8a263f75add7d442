"""Every knob of a family, in every way a batch may be cut, against transformers' own forward."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.models import registry
from ssd.models.checkpoint import inspect
from tests.models import tiny

TOLERANCE = 1e-4
PAGES = 64  # of 4 tokens: MAX_POSITION
THETA = {"rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

KNOBS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "llama": (tiny.llama, {}),
    "llama without GQA": (tiny.llama, {"num_key_value_heads": 4}),
    "llama with one key head": (tiny.llama, {"num_key_value_heads": 1}),
    "llama with three queries a key": (tiny.llama, {"num_attention_heads": 6, "hidden_size": 48}),
    "llama tied": (tiny.llama, {"tie_word_embeddings": True}),
    "llama attention bias": (tiny.llama, {"attention_bias": True}),
    "llama feed-forward bias": (tiny.llama, {"mlp_bias": True}),
    "llama head_dim": (tiny.llama, {"head_dim": 20}),
    "llama eps": (tiny.llama, {"rms_norm_eps": 0.1}),
    "llama vocabulary": (tiny.llama, {"vocab_size": 257}),
    "llama theta": (tiny.llama, {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
    "llama linear rope": (tiny.llama, {"rope_parameters": THETA | {"rope_type": "linear", "factor": 4.0}}),
    "llama llama3 rope": (tiny.llama, {"rope_parameters": THETA | LLAMA3}),
    "llama sharded": (tiny.llama, {"shards": True, "num_hidden_layers": 3}),
    "qwen3": (tiny.qwen3, {}),
    "qwen3 tied": (tiny.qwen3, {"tie_word_embeddings": True}),
    "qwen3 head_dim": (tiny.qwen3, {"head_dim": 20, "num_key_value_heads": 4}),
    "qwen3 bias, eps, theta": (
        tiny.qwen3,
        {
            "attention_bias": True,
            "rms_norm_eps": 0.1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "qwen3 linear rope": (tiny.qwen3, {"rope_parameters": THETA | {"rope_type": "linear", "factor": 4.0}}),
    "qwen3 window that no layer uses": (tiny.qwen3, {"use_sliding_window": True, "sliding_window": 4}),
}


@dataclass(frozen=True)
class Pair:
    """One checkpoint twice: in our engine, and transformers' logits for a text."""

    runner: Runner
    text: list[int]
    expected: Tensor
    others: list[tuple[list[int], Tensor]]

    def check(self, logits: Tensor, expected: Tensor | None = None) -> None:
        expected = self.expected if expected is None else expected
        assert logits.shape == expected.shape
        assert (logits - expected).abs().max() <= TOLERANCE


@pytest.fixture(scope="module", params=KNOBS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    write, knobs = KNOBS[request.param]
    directory = write(tmp_path_factory.mktemp("model"), **knobs)
    oracle = tiny.oracle(directory)
    texts = [tiny.token_ids(count, seed) for seed, count in enumerate((90, 1, 7, 33))]
    expected = [tiny.oracle_logits(oracle, text) for text in texts]
    runner = tiny.runner(directory, pages=4 * PAGES)
    return Pair(runner, texts[0], expected[0], list(zip(texts[1:], expected[1:], strict=True)))


def in_chunks(pair: Pair, pages: list[int], sizes: list[int]) -> Tensor:
    """The text in one row per forward, of the sizes given in turn."""
    logits: list[Tensor] = []
    start = 0
    while start < len(pair.text):
        chunk = pair.text[start : start + sizes[len(logits) % len(sizes)]]
        logits.append(pair.runner.forward([Row(chunk, start, pages, outputs=len(chunk))]))
        start += len(chunk)
    return torch.cat(logits)


def test_whole_prefill(pair: Pair) -> None:
    pair.check(in_chunks(pair, list(range(PAGES)), [len(pair.text)]))


def test_chunked_prefill(pair: Pair) -> None:
    pair.check(in_chunks(pair, list(range(PAGES)), [16, 1, 5, 23]))


def test_token_by_token(pair: Pair) -> None:
    pair.check(in_chunks(pair, list(range(PAGES)), [1]))


def test_fragmented_pages(pair: Pair) -> None:
    scattered = [(37 * index + 5) % (4 * PAGES) for index in range(PAGES)]
    pair.check(in_chunks(pair, scattered, [30, 1, 3]))


def test_only_the_wanted_outputs_of_a_row_come_back(pair: Pair) -> None:
    pages = list(range(PAGES))
    assert pair.runner.forward([Row(pair.text[:80], 0, pages, outputs=0)]).shape == (0, pair.expected.shape[1])
    pair.check(pair.runner.forward([Row(pair.text[80:], 80, pages, outputs=3)]), pair.expected[-3:])


def test_ragged_batch(pair: Pair) -> None:
    """Prefill, a prefill chunk, decode and a verification of other sequences in one forward, in scattered pages."""
    pages = [list(range(index, 4 * PAGES, 4)) for index in range(4)]
    known = [40, 0, 6, 28]
    texts = [(pair.text, pair.expected), *pair.others]
    before = [Row(ids[:n], 0, table, outputs=0) for (ids, _), n, table in zip(texts, known, pages, strict=True) if n]
    pair.runner.forward(before)
    rows = [Row(ids[n:], n, table, len(ids) - n) for (ids, _), n, table in zip(texts, known, pages, strict=True)]
    expected = torch.cat([logits[n:] for (_, logits), n in zip(texts, known, strict=True)])
    pair.check(pair.runner.forward(rows), expected)


@pytest.mark.parametrize("knobs", ["llama theta", "llama linear rope", "llama llama3 rope"])
def test_old_configs_keep_theta_beside_the_scaling(tmp_path: Path, knobs: str) -> None:
    """As checkpoints of before transformers 5 have it: `rope_theta`, `rope_scaling`, the kind perhaps as `type`."""
    directory = tiny.llama(tmp_path, **KNOBS[knobs][1])
    rows = [Row(tiny.token_ids(90, 0), 0, range(PAGES), outputs=90)]
    new = tiny.runner(directory).forward(rows)
    scaling = dict(KNOBS[knobs][1]["rope_parameters"])
    theta, kind = scaling.pop("rope_theta"), scaling.pop("rope_type")
    old: dict[str, Any] = {"rope_parameters": None, "rope_theta": theta, "rope_scaling": None}
    if kind != "default":
        old["rope_scaling"] = scaling | ({"type": kind} if kind == "linear" else {"rope_type": kind})
    assert torch.equal(tiny.runner(edit(directory, **old)).forward(rows), new)


# -- what is refused --------------------------------------------------------------------------------------------------


def refusal(directory: Path) -> str:
    with pytest.raises(UsageError) as caught:
        tiny.runner(directory)
    return str(caught.value)


def edit(directory: Path, **fields: Any) -> Path:
    """Change fields of config.json."""
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return directory


def test_unknown_activation(tmp_path: Path) -> None:
    assert "gelu" in refusal(tiny.llama(tmp_path, hidden_act="gelu"))


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "su"])
@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_unknown_rope_scaling(tmp_path: Path, kind: str, field: str) -> None:
    """In the fields of new and of old configs; a scaling that is ignored gives text that is wrong only when long."""
    directory = edit(tiny.llama(tmp_path), rope_parameters=None)
    assert repr(kind) in refusal(edit(directory, **{field: {"type": kind, "factor": 2.0}}))


def test_missing_tensor(tmp_path: Path) -> None:
    file = tiny.llama(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file)
    assert "model.layers.1.mlp.up_proj.weight is missing" in refusal(tmp_path)


def test_missing_bias(tmp_path: Path) -> None:
    assert "self_attn.q_proj.bias is missing" in refusal(edit(tiny.llama(tmp_path), attention_bias=True))


def test_wrong_shape(tmp_path: Path) -> None:
    message = refusal(edit(tiny.llama(tmp_path), num_key_value_heads=4))
    assert "self_attn.k_proj.weight has shape (16, 32), expected (32, 32)" in message


def test_missing_number(tmp_path: Path) -> None:
    directory = tiny.llama(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    del config["num_attention_heads"]
    (directory / "config.json").write_text(json.dumps(config))
    assert "num_attention_heads" in refusal(directory)


@pytest.mark.parametrize("layer_types", [None, ["full_attention", "sliding_attention"]])
def test_qwen3_that_uses_a_sliding_window(tmp_path: Path, layer_types: list[str] | None) -> None:
    directory = tiny.qwen3(tmp_path, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    assert "sliding-window" in refusal(edit(directory, layer_types=layer_types))


def test_llama_with_a_sliding_window(tmp_path: Path) -> None:
    """Mistral's field: there is no switch beside it."""
    assert "sliding-window" in refusal(edit(tiny.llama(tmp_path), sliding_window=16))


def test_quantised_weights(tmp_path: Path) -> None:
    """Some keep the names and shapes of the tensors, and their scales beside them: read as they are, they are noise."""
    assert "quantised" in refusal(edit(tiny.llama(tmp_path), quantization_config={"quant_method": "fp8"}))


def test_window_that_is_switched_off_is_accepted(tmp_path: Path) -> None:
    """As the configs of Qwen2.5 and of early Qwen3 have it."""
    directory = edit(tiny.qwen3(tmp_path), use_sliding_window=False, sliding_window=16, layer_types=None)
    assert tiny.runner(directory).model.shape.layers == 2


def test_unknown_family_names_the_known_ones(tmp_path: Path) -> None:
    message = refusal(edit(tiny.llama(tmp_path), model_type="mamba"))
    assert all(word in message for word in ("mamba", "llama", "qwen3", str(tmp_path)))


def test_both_families_are_found_through_entry_points() -> None:
    assert registry.families().items() >= {"llama": "built in", "qwen3": "built in"}.items()


# -- dummy weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [tiny.llama, tiny.qwen3])
def test_dummy_weights_are_the_same_wherever_they_are_made(tmp_path: Path, write: Callable[..., Path]) -> None:
    """`--load-format dummy` reads no tensor, and every process makes the same model."""
    directory = write(tmp_path)
    (directory / "model.safetensors").unlink()
    checkpoint = inspect(directory, weights=False)
    rows = [Row(tiny.token_ids(9, 0), 0, range(4), outputs=9)]
    one, two = (
        Runner(registry.load(checkpoint, torch.float32, tiny.CPU, 64, dummy=True), 4, 4).forward(rows) for _ in range(2)
    )
    assert torch.equal(one, two) and one.isfinite().all() and one.std() > 0
