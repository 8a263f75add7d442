"""A loaded model takes little more memory than its file: no weight becomes float32, none is there twice."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path
from types import FunctionType, ModuleType

import gguf
import numpy as np
import pytest
import torch

from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.kernels import cpu
from ssd.models import registry
from ssd.models.checkpoint import inspect
from ssd.models.gguf_architectures import ARCHITECTURES
from ssd.models.gguf_blocks import BLOCKS
from ssd.models.gguf_tensors import GGUF_FILE
from ssd.models.sizes import host_bytes
from tests.models import tiny
from tests.models.gguf_writer import finish, write_gguf
from tests.models.test_gguf_blocks import drawn

WIDTH, INNER, LAYERS, VOCABULARY = 256, 768, 2, 1200
MOST = 1.15
pytestmark = pytest.mark.skipif(
    not cpu.multiply_floats(torch.empty(1, 1)), reason="without our products layers and tables are float32"
)


def write(directory: Path, kinds: dict[str, str], tied: bool, dequantized: bool = False) -> Path:
    """A Llama of random blocks in a folder: a tensor's part of `kinds`, else "", names its type. -> the GGUF.

    `dequantized`: in float32, with the same numbers."""
    directory.mkdir(exist_ok=True)
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    known = tiny.SIZES | sizes | heads | {"model_type": "llama", "tie_word_embeddings": tied}
    (directory / "config.json").write_text(json.dumps(known))
    writer = gguf.GGUFWriter(file := directory / GGUF_FILE, "llama")
    rows = {"attn_k": WIDTH // 2, "attn_v": WIDTH // 2, "ffn_gate": INNER, "ffn_up": INNER}
    for name in (
        "output_norm",
        *(f"blk.{layer}.{part}" for layer in range(LAYERS) for part in ARCHITECTURES["llama"].layer),
    ):
        part = name.rpartition(".")[2]
        if part.endswith("norm"):
            writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
        else:
            _add(writer, name, rows.get(part, WIDTH), INNER if part == "ffn_down" else WIDTH, kinds, dequantized)
    for name in ("token_embd",) if tied else ("token_embd", "output"):
        _add(writer, name, VOCABULARY, WIDTH, kinds, dequantized)
    finish(writer)
    return file


def _add(
    writer: gguf.GGUFWriter, name: str, outputs: int, inputs: int, kinds: dict[str, str], dequantized: bool
) -> None:
    kind = gguf.GGMLQuantizationType[kinds.get(name.rpartition(".")[2], kinds[""])]
    blocks = drawn(kind.name, outputs, inputs)
    if dequantized:
        writer.add_tensor(f"{name}.weight", gguf.dequantize(blocks, kind))
    else:
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=kind)


def tensor_bytes(root: object) -> int:
    """Bytes of all tensors that an object holds."""
    seen, found, open_ = set[int](), dict[int, int](), [root]
    while open_:
        one = open_.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        else:
            open_ += gc.get_referents(one)
    return sum(found.values())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "kinds",
    [
        {"": "Q4_K"},
        {"": "Q8_0"},
        {"": "Q4_1", "token_embd": "Q8_0"},
        {"": "Q4_K", "token_embd": "Q6_K", "attn_v": "Q6_K"},
    ],
    ids=["Q4_K", "Q8_0", "Q4_1 and Q8_0", "Q4_K and Q6_K"],
)
def test_a_gguf_takes_little_more_than_its_file(kinds: dict[str, str], tied: bool, tmp_path: Path) -> None:
    file = write(tmp_path, kinds, tied)
    model = registry.load(inspect(tmp_path), torch.float32, tiny.CPU, max_position=64)
    assert tensor_bytes(model) < MOST * file.stat().st_size
    check_expected(tmp_path, tensor_bytes(model))


def logits(directory: Path) -> torch.Tensor:
    model = registry.load(inspect(directory), torch.float32, tiny.CPU, max_position=64)
    return Runner(model, 4, 16).forward([Row(tiny.token_ids(40, 1, VOCABULARY), 0, range(4), outputs=40)])


@pytest.mark.parametrize("kind", [*BLOCKS, "Q4_K and Q6_K"])
def test_logits_of_every_type_are_those_of_the_dequantized_model(kind: str, tmp_path: Path) -> None:
    """Bit for bit, where inputs are not rounded."""
    first, *rest = kind.split(" and ")
    kinds = {"": first, **{part: other for other in rest for part in ("attn_v", "ffn_down", "token_embd")}}
    for name, dequantized in (("blocks", False), ("floats", True)):
        write(tmp_path / name, kinds, True, dequantized)
    found = logits(tmp_path / "blocks")
    assert found.isfinite().all() and torch.equal(found, logits(tmp_path / "floats"))


def check_expected(directory: Path, held: int, int8: bool = False) -> None:
    """A start counts what the model will hold, but for norms and positions."""
    assert 0.93 * held < host_bytes(inspect(directory), 4, packs=True, int8=int8) <= held


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("int8", [False, True], ids=["as it is", "int8"])
@pytest.mark.parametrize("kind", ["BF16", "F16", "F32"])
def test_a_start_counts_what_floats_will_take(kind: str, int8: bool, tied: bool, tmp_path: Path) -> None:
    """Of blocks `test_a_gguf_takes_little_more_than_its_file` looks at it."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "vocab_size": VOCABULARY, "tie_word_embeddings": tied}
    write_gguf(tiny.llama(tmp_path / "whole", **sizes), tmp_path / GGUF_FILE, kind)
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path)
    model = registry.load(inspect(tmp_path), torch.float32, tiny.CPU, max_position=64, int8=int8)
    check_expected(tmp_path, tensor_bytes(model), int8)
