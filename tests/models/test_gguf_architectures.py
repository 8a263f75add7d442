"""GGUF files of every architecture: logits of the model that each was made of, in transformers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from ssd import LLM, SamplingParams
from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.kernels.groups import Groups
from ssd.models import checkpoint, hub
from ssd.models.weights import from_checkpoint
from tests.models import ggufs, tiny
from tests.models.gguf_writer import finish
from tests.models.knobs import LINEAR, LLAMA3, THETA
from tests.ranks import part, side_by_side

pytestmark = pytest.mark.usefixtures("own_cache")

YARN = THETA | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama linear": ("llama", {"rope_parameters": LINEAR}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "llama of 3.1": ("llama", {"rope_parameters": THETA | LLAMA3}),
    "llama head_dim": ("llama", {"head_dim": 32}),
    "mistral": ("mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3_moe": ("qwen3_moe", MOE | {"head_dim": 16}),
}
TYPES = ("F32", "Q8_0", "Q4_0", "Q5_1")


def logits_of(directory: Path, text: list[int]) -> Any:
    return tiny.runner(directory).forward([Row(text, 0, range(16), len(text))])


def rounded(made_of: Path, kind: str) -> None:
    """Round the tables of a checkpoint as its GGUF has them."""

    def table(name: str, weight: np.ndarray) -> np.ndarray:
        if weight.ndim < 2 or name.endswith(("mlp.gate.weight", "mlp.router.weight", "_bias")):
            return weight
        if weight.ndim == 3:  # gpt-oss's stacks, [experts, in, out]
            return np.ascontiguousarray(ggufs.rounded(np.ascontiguousarray(weight.swapaxes(1, 2)), kind).swapaxes(1, 2))
        if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            return np.ascontiguousarray(ggufs.rounded(np.ascontiguousarray(weight.T), kind).T)
        return ggufs.rounded(weight, kind)

    weights = load_file(made_of / "model.safetensors")
    save_file({name: table(name, w) for name, w in weights.items()}, made_of / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_checkpoint_rounded(name: str, tmp_path: Path) -> None:
    """Each in one type of blocks and in float32, so that no type is left out."""
    check_logits(*MODELS[name], ("F32", TYPES[1 + list(MODELS).index(name) % 3]), tmp_path)


def check_logits(model_type: str, config: dict[str, Any], kinds: Sequence[str], folder: Path) -> None:
    tiny.tokenizer(folder)
    text = tiny.token_ids(60, 0, 300)
    for kind in kinds:
        made_of = ggufs.write_model(folder / f"{kind}.gguf", model_type, kind, **config)
        rounded(made_of, kind)
        logits = logits_of(hub.resolve(str(folder / f"{kind}.gguf")), text)
        expected = tiny.oracle_logits(tiny.oracle(made_of), text)
        assert (logits - expected).abs().max() <= 1e-4 * max(1.0, expected.std())
        assert expected.std() > 0.1


def test_a_gguf_and_a_folder_are_a_pair_either_way(tmp_path: Path) -> None:
    """Of two architectures; ids are those of the target alone."""
    tiny.tokenizer(tmp_path)
    qwen = ggufs.write_model(tmp_path / "qwen.gguf", "qwen3", "Q8_0", head_dim=16)
    llama = ggufs.write_model(tmp_path / "llama.gguf", "llama", "Q8_0")
    for folder in (qwen, llama):
        tiny.tokenizer(folder)
    asked = SamplingParams(max_tokens=8, ignore_eos=True)
    with LLM(str(tmp_path / "qwen.gguf"), mode="ar", dtype="float32") as llm:
        alone = llm.generate(["A tiny model"], [asked])[0].token_ids
    for draft in (tmp_path / "llama.gguf", qwen):
        with LLM(str(tmp_path / "qwen.gguf"), [str(draft)], mode="sd", dtype="float32") as llm:
            assert llm.generate(["A tiny model"], [asked])[0].token_ids == alone


@pytest.mark.parametrize("name", ["llama of 3.1", "qwen3_moe"])
def test_two_ranks_give_the_logits_of_one(name: str, tmp_path: Path) -> None:
    check_two_ranks(*MODELS[name], tmp_path)


def check_two_ranks(model_type: str, config: dict[str, Any], folder: Path) -> None:
    tiny.tokenizer(folder)
    ggufs.write_model(folder / "x.gguf", model_type, "Q8_0", **config)
    directory, text = hub.resolve(str(folder / "x.gguf")), tiny.token_ids(40, 0, 300)
    expected = logits_of(directory, text)
    row = Row(text, 0, range(16), len(text))
    ours = side_by_side(2, lambda ranks: part(directory, ranks).forward([row]))[0]
    assert (ours - expected).abs().max() <= 1e-4 * max(1.0, expected.std())


def test_experts_stay_blocks(tmp_path: Path) -> None:
    tiny.tokenizer(tmp_path)
    ggufs.write_model(tmp_path / "x.gguf", "qwen3_moe", "Q8_0", **MOE)
    found = checkpoint.inspect(hub.resolve(str(tmp_path / "x.gguf")))
    below = from_checkpoint(found, torch.float32, tiny.CPU).below("model.layers.1.mlp.experts.5")
    weight = below.stacked([("gate_proj", 32), ("up_proj", 32)], 64)
    assert isinstance(weight, Groups) and weight.shape == (64, 64)


def test_a_model_in_several_files(tmp_path: Path) -> None:
    tiny.tokenizer(tmp_path)
    made_of = ggufs.write_model(tmp_path / "x.gguf", "qwen2")
    first, *rest = split(tmp_path / "x.gguf", 3)
    text = tiny.token_ids(40, 0, 300)
    directory = hub.resolve(str(first))
    expected = tiny.oracle_logits(tiny.oracle(made_of), text)
    assert (logits_of(directory, text) - expected).abs().max() <= 1e-4
    digest = checkpoint.inspect(directory).digest
    with pytest.raises(UsageError, match=r"part 2 of a model in 3 files: name the first"):
        hub.resolve(str(rest[0]))
    stat = rest[1].stat()
    os.utime(rest[1], ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))
    with pytest.raises(UsageError, match="has changed"):
        checkpoint.inspect(directory)
    assert checkpoint.inspect(hub.resolve(str(first))).digest == digest
    shutil.copyfile(rest[0], rest[1])
    with pytest.raises(UsageError, match=r"is not that of the files|is in another file too"):
        hub.resolve(str(first))
    rest[1].unlink()
    with pytest.raises(UsageError, match=r"has no x-00003-of-00003\.gguf"):
        hub.resolve(str(first))


def split(file: Path, count: int) -> list[Path]:
    """The parts of a file as gguf-split writes them: metadata in the first, tensors in all."""
    whole, shards = gguf.GGUFReader(file), []
    names = [tensor.name for tensor in whole.tensors]
    for index in range(count):
        shards.append(file.with_name(f"{file.stem}-{index + 1:05}-of-{count:05}.gguf"))
        arch = whole.fields["general.architecture"].contents()
        writer = gguf.GGUFWriter(shards[-1], arch)
        if not index:
            for key, field in whole.fields.items():
                if key.startswith(f"{arch}."):
                    writer.add_key_value(key, field.contents(), field.types[0])
        writer.add_uint16("split.no", index)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(names))
        for tensor in whole.tensors[index::count]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        finish(writer)
    return shards


# -- what is refused --------------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen2", {"qwen2.attention.sliding_window": 9.0}, "qwen2.attention.sliding_window 9.0 is not supported"),
    ("qwen3", {"qwen3.expert_count": 4.0}, "qwen3.expert_count 4.0 is not supported"),
    ("qwen3_moe", {"qwen3moe.expert_count": 7.0}, "'blk.0.ffn_[a-z]+_exps.weight' has 6 experts, the metadata 7.0"),
    ("qwen3_moe", {"qwen3moe.expert_shared_count": 1.0}, "qwen3moe.expert_shared_count 1.0 is not supported"),
    ("qwen2", {"qwen2.embedding_length": 32.0}, "qwen2.embedding_length 32.0 is not supported: .* it is 64"),
]


@pytest.mark.parametrize(("name", "fields", "message"), REFUSED, ids=str)
def test_metadata_that_asks_for_what_is_not_done_is_refused(
    name: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    check_refused(*MODELS[name], fields, message, tmp_path)


def check_refused(model_type: str, config: dict[str, Any], fields: dict[str, Any], message: str, folder: Path) -> None:
    tiny.tokenizer(folder)
    ggufs.write_model(folder / "x.gguf", model_type, metadata=fields, **config)
    with pytest.raises(UsageError, match=message) as caught:
        hub.resolve(str(folder / "x.gguf"))
    assert str(folder / "x.gguf") in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "extra", "array", "message"),
    [
        (
            "qwen3",
            "blk.0.attn_q.bias",
            np.ones(64),
            "'blk.0.attn_q.bias' is not part of a model of architecture 'qwen3'",
        ),
        ("qwen2", "rope_freqs.weight", np.ones(7), "'rope_freqs.weight' must have 8 numbers in F32"),
        ("qwen2", "rope_freqs.weight", np.zeros(8), "'rope_freqs.weight' has a factor that is not positive"),
        ("qwen2", "rope_factors_long.weight", np.ones(8), "is not supported in architecture 'qwen2'"),
    ],
)
def test_tensors_that_the_architecture_lacks_are_refused(
    model_type: str, extra: str, array: np.ndarray, message: str, tmp_path: Path
) -> None:
    check_lacking(model_type, extra, array, message, tmp_path)


def check_lacking(model_type: str, extra: str, array: np.ndarray, message: str, folder: Path) -> None:
    tiny.tokenizer(folder)
    ggufs.write_model(folder / "x.gguf", model_type, tensors={extra: array.astype(np.float32)}, pad_token_id=0)
    with pytest.raises(UsageError, match=message):
        hub.resolve(str(folder / "x.gguf"))


@pytest.mark.parametrize(
    ("model_type", "config", "missing"),
    [("qwen2", {}, "blk.1.attn_k.bias"), ("qwen3_moe", MOE, "blk.0.ffn_down_exps.weight")],
)
def test_tensors_that_are_missing_are_named(
    model_type: str, config: dict[str, Any], missing: str, tmp_path: Path
) -> None:
    check_missing(model_type, config, missing, tmp_path)


def check_missing(model_type: str, config: dict[str, Any], missing: str, folder: Path) -> None:
    tiny.tokenizer(folder)
    ggufs.write_model(folder / "x.gguf", model_type, tensors={missing: None}, **config)
    with pytest.raises(UsageError, match=r"tensor \S+ is missing"):
        tiny.runner(hub.resolve(str(folder / "x.gguf")))
