"""`tools/inflate`: a wider and deeper checkpoint computes what the small one computes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open

from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.models import sizes as model_sizes
from ssd.models.checkpoint import Checkpoint, inspect
from ssd.models.pairs import SHARED
from tests.models import tiny
from tools.inflate.__main__ import main
from tools.inflate.sizes import LIKE, Sizes, fit

# 32 wide, 2 layers, 4 heads over 2 of 8 numbers, 52 in the feed-forward: all of it grows, by no whole factor.
LARGER = ["--hidden-size", "56", "--layers", "3", "--heads", "18", "--kv-heads", "3", "--intermediate-size", "90"]
SHARED_KEYS = ["--heads", "6", "--kv-heads", "6"]  # a key head each, where two query heads shared one
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 5, "head_dim": 8}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 8}),
}


def inflated(source: Path, out: Path, *flags: str, code: int = 0) -> str:
    """What the command says, in this process."""
    done = CliRunner().invoke(main, [str(source), "--out", str(out), "--dtype", "float32", *flags])
    assert done.exit_code == code, (done.output, done.exception)
    return done.output


def logits(runner: Runner, token_ids: list[int]) -> torch.Tensor:
    return runner.forward([Row(token_ids, 0, range(64), len(token_ids))])


def greedy(runner: Runner, token_ids: list[int], count: int) -> list[int]:
    text = list(token_ids)
    for _ in range(count):
        text.append(int(runner.forward([Row(text, 0, range(64))])[-1].argmax()))
    return text


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "flags", [LARGER, [*LARGER, "--head-dim", "24"], SHARED_KEYS], ids=["larger", "larger heads", "copied keys"]
)
def test_logits_and_greedy_ids_stay(name: str, flags: list[str], tmp_path: Path) -> None:
    kind, fields = MODELS[name]
    source = tiny.model(kind, tmp_path / "small", **fields)
    inflated(source, tmp_path / "large", *flags)
    small, large = tiny.runner(source), tiny.runner(tmp_path / "large")
    prompt = tiny.token_ids(20, seed=1)
    torch.testing.assert_close(logits(large, prompt), logits(small, prompt), atol=1e-5, rtol=1e-5)
    assert greedy(large, prompt[:6], 12) == greedy(small, prompt[:6], 12)


def test_transformers_reads_it_alike(tmp_path: Path) -> None:
    source = tiny.qwen3(tmp_path / "small")
    inflated(source, tmp_path / "large", *LARGER, "--head-dim", "16")
    prompt = tiny.token_ids(20, seed=1)
    ours, theirs = (tiny.oracle_logits(tiny.oracle(folder), prompt) for folder in (tmp_path / "large", source))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_what_is_added_is_read_and_is_no_constant(tmp_path: Path) -> None:
    """Else a device might be faster on it than on a real model."""
    source = tiny.llama(tmp_path / "small")
    inflated(source, tmp_path / "large", *LARGER, "--shard-gib", "0.00002")
    found = inspect(tmp_path / "large")
    assert len({info.file for info in found.tensors.values()}) > 3

    def tensor(name: str) -> torch.Tensor:
        with safe_open(found.tensors[name].file, framework="pt") as file:
            return file.get_tensor(name)  # type: ignore[no-any-return]

    layer = "model.layers.2"  # one that is new
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        weight = tensor(f"{layer}.{name}.weight")
        assert (weight != 0).all() and len(weight.unique(dim=0)) == len(weight)
    assert not tensor(f"{layer}.self_attn.o_proj.weight").any() and not tensor(f"{layer}.mlp.down_proj.weight").any()
    heads = tensor("model.layers.0.self_attn.q_proj.weight").view(18, 8, 56)
    assert (heads != 0).any(dim=(1, 2)).all()  # old ones and new ones


def test_sixteen_bits_are_near(tmp_path: Path) -> None:
    source = tiny.llama(tmp_path / "small")
    inflated(source, tmp_path / "large", *LARGER, "--dtype", "bfloat16")
    assert {info.dtype for info in inspect(tmp_path / "large").tensors.values()} == {"BF16"}
    prompt = tiny.token_ids(20, seed=1)
    ours, theirs = (logits(tiny.runner(folder), prompt) for folder in (tmp_path / "large", source))
    assert (ours - theirs).norm() < 0.02 * theirs.norm()


def test_a_draft_that_shares_tensors_becomes_one_of_its_own(tmp_path: Path) -> None:
    target = tiny.tokenizer(tiny.llama(tmp_path / "target", vocab_size=300))
    draft = tiny.edit(tiny.llama(tmp_path / "draft", vocab_size=300), **{SHARED: ["lm_head.weight"]})
    assert "name that with --lender" in inflated(draft, tmp_path / "large", code=1)
    inflated(draft, tmp_path / "large", "--lender", str(target), "--layers", "3")
    found = inspect(tmp_path / "large")
    assert SHARED not in found.config and found.config["num_hidden_layers"] == 3
    with (
        safe_open(found.tensors["lm_head.weight"].file, framework="pt") as file,
        safe_open(target / "model.safetensors", framework="pt") as lent,
    ):
        assert torch.equal(file.get_tensor("lm_head.weight"), lent.get_tensor("lm_head.weight"))


def test_the_tokenizer_comes_along_and_nothing_is_overwritten(tmp_path: Path) -> None:
    source = tiny.tokenizer(tiny.llama(tmp_path / "small", vocab_size=300))
    inflated(source, tmp_path / "large")
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "large" / name).read_bytes() == (source / name).read_bytes()
    assert "has a checkpoint already" in inflated(source, tmp_path / "large", code=1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hidden-size", "31"], "hidden_size 31 is fewer than the 32"),
        (["--layers", "1"], "num_hidden_layers 1 is fewer than the 2"),
        (["--heads", "2", "--kv-heads", "2"], "num_attention_heads 2 is fewer than the 4"),
        (["--heads", "6", "--kv-heads", "1"], "num_key_value_heads 1 is fewer than the 2 needed"),
        (["--heads", "5", "--kv-heads", "5"], None),
        (["--heads", "4", "--kv-heads", "4"], None),
        (["--heads", "6", "--kv-heads", "4"], "6 are no multiple of num_key_value_heads 4"),
        (["--head-dim", "12"], "head_dim 12 is no multiple of 8"),
        (["--intermediate-size", "8"], "intermediate_size 8 is fewer than the 52"),
        (["--like", "llama-8b", "--layers", "1"], "num_hidden_layers 1 is fewer"),
    ],
)
def test_what_has_no_room_is_refused(flags: list[str], message: str | None, tmp_path: Path) -> None:
    source = tiny.llama(tmp_path / "small")
    said = inflated(source, tmp_path / "large", *flags, code=0 if message is None else 1)
    assert message is None or message in said
    assert (tmp_path / "large").exists() == (message is None)


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny.llama(tmp_path / "small")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    assert "GiB are free there" in inflated(source, tmp_path / "large", "--like", "llama-8b", code=1)
    assert list((tmp_path / "large").iterdir()) == []


def test_other_families_are_refused(tmp_path: Path) -> None:
    source = tiny.model("qwen3_moe", tmp_path / "small")
    assert "family 'qwen3_moe' cannot be inflated" in inflated(source, tmp_path / "large", code=1)


def test_models_are_as_large_as_their_names_say() -> None:
    billions = {
        name: model_sizes.weights(Checkpoint(Path(name), like.config(4096), {}, 0, "")) / 1e9
        for name, like in LIKE.items()
    }
    expected = {"llama-1b": 1.5, "llama-3b": 3.6, "llama-8b": 8.0, "llama-70b": 70.6}
    expected |= {"qwen3-0.6b": 0.75, "qwen3-8b": 8.2, "qwen3-32b": 32.8}
    assert billions == pytest.approx(expected, rel=0.02)


def test_a_small_model_fits_into_every_one_that_is_deep_enough() -> None:
    smollm2 = Sizes(576, 30, 9, 3, 64, 1536)
    for name in ("llama-8b", "llama-70b", "qwen3-8b", "qwen3-32b"):
        found = fit(smollm2, LIKE[name].sizes)
        places = [found.query_place(head) for head in range(9)]
        assert len(set(places)) == 9 and found.copies == 1
        assert [place // found.new.repeat for place in places] == [head // 3 for head in range(9)]
    with pytest.raises(UsageError, match="num_hidden_layers 16 is fewer than the 30"):
        fit(smollm2, LIKE["llama-1b"].sizes)
    assert set(asdict(smollm2)) <= set(LIKE["llama-1b"].config(4096))
