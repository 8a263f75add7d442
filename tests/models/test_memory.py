"""A loaded model takes little more memory than its file, and as much as is predicted from its headers."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ssd.config.engine import DType
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.kernels import cpu
from ssd.models import pairs, registry
from ssd.models.checkpoint import inspect
from ssd.models.gguf.architectures import LLAMA
from ssd.models.gguf.blocks import BLOCKS
from ssd.models.gguf.tensors import GGUF_FILE
from ssd.models.head import with_list
from ssd.models.interface import Model
from ssd.models.resident import Rounding, resident_bytes
from ssd.models.sizes import ModelSizes
from tests.models import test_quantized, tiny
from tests.models.gguf_writer import finish, write_gguf
from tests.models.knobs import RECURRENT
from tests.models.test_gguf_blocks import drawn

WIDTH, INNER, LAYERS, VOCABULARY = 256, 768, 2, 1200
MOST = 1.15
pytestmark = pytest.mark.skipif(
    not cpu.multiply_floats(torch.empty(1, 1)), reason="without our products layers and tables are float32"
)


def write(
    directory: Path, kinds: dict[str, str], tied: bool, dequantized: bool = False, vocabulary: int = VOCABULARY
) -> Path:
    """A Llama of random blocks in a folder: a tensor's part of `kinds`, else "", names its type. -> the GGUF.

    `dequantized`: in float32, with the same numbers."""
    directory.mkdir(exist_ok=True)
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "vocab_size": vocabulary, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    known = tiny.SIZES | sizes | heads | {"model_type": "llama", "tie_word_embeddings": tied}
    (directory / "config.json").write_text(json.dumps(known))
    writer = gguf.GGUFWriter(file := directory / GGUF_FILE, "llama")
    rows = {"attn_k": WIDTH // 2, "attn_v": WIDTH // 2, "ffn_gate": INNER, "ffn_up": INNER}
    for name in (
        "output_norm",
        *(f"blk.{layer}.{part}" for layer in range(LAYERS) for part in LLAMA.layer),
    ):
        part = name.rpartition(".")[2]
        if part.endswith("norm"):
            writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
        else:
            _add(writer, name, rows.get(part, WIDTH), INNER if part == "ffn_down" else WIDTH, kinds, dequantized)
    for name in ("token_embd",) if tied else ("token_embd", "output"):
        _add(writer, name, vocabulary, WIDTH, kinds, dequantized)
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
        if isinstance(one, torch.Tensor) and one.layout == torch._mkldnn:  # type: ignore[attr-defined]
            found[id(one)] = one.nbytes
        elif isinstance(one, torch.Tensor):
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


def check_expected(directory: Path, held: int, quantize: Rounding = "none") -> None:
    """A start counts what the model will hold, but for norms and positions."""
    assert 0.93 * held < resident_bytes(inspect(directory), "float32", quantize) <= 1.01 * held


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("quantize", ["none", "int8", "light"])
@pytest.mark.parametrize("kind", ["BF16", "F16", "F32"])
def test_a_start_counts_what_floats_will_take(kind: str, quantize: Rounding, tied: bool, tmp_path: Path) -> None:
    """Of blocks `test_a_gguf_takes_little_more_than_its_file` looks at it."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": INNER, "vocab_size": VOCABULARY, "tie_word_embeddings": tied}
    write_gguf(tiny.llama(tmp_path / "whole", **sizes), tmp_path / GGUF_FILE, kind)
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path)
    model = loaded(tmp_path, quantize)
    check_expected(tmp_path, tensor_bytes(model), quantize)


def loaded(directory: Path, quantize: Rounding) -> Model:
    how = {"int8": quantize != "none", "light": quantize == "light"}
    return registry.load(inspect(directory), torch.float32, tiny.CPU, max_position=64, **how)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K and Q6_K"])
def test_a_light_draft_predicts_few_ids_in_four_bits(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It predicts the first ids and the last ones, and takes the memory that was foretold."""
    monkeypatch.setattr(pairs, "_FIRST", 512)
    monkeypatch.setattr(pairs, "_LAST", 8)
    first, *rest = kind.split(" and ")
    write(tmp_path, {"": first, **{part: other for other in rest for part in ("attn_v", "ffn_down")}}, False)
    model = loaded(tmp_path, "light")
    assert model.head.ids.tolist() == [*range(512), *range(VOCABULARY - 8, VOCABULARY)]
    check_expected(tmp_path, tensor_bytes(model), "light")
    rows = [Row(tiny.token_ids(40, 1, VOCABULARY), 0, range(4), outputs=40)]
    light, whole = (Runner(one, 4, 16).forward(rows) for one in (model, loaded(tmp_path, "int8")))
    agreeing = (light.argmax(1) == whole[:, model.head.ids].argmax(1)).float().mean()
    assert light.shape == (40, 520) and agreeing > 0.5


def floats(kind: str, folder: Path, **changes: Any) -> Path:
    """A model whose numbers are bfloat16's, in a file that says so."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 3000}
    directory = tiny.model(kind, folder, **sizes, **changes)
    stored = {name: tensor.bfloat16() for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def listed(folder: Path, tied: bool) -> Path:
    """A draft that predicts 500 of its 3000 ids."""
    directory = floats("llama", folder, tie_word_embeddings=tied)
    save_file({"ids": torch.arange(500)}, directory / "draft_vocab.safetensors")
    return directory


@pytest.mark.parametrize(
    ("kind", "changes", "dtype", "quantize"),
    [
        ("llama", {"tie_word_embeddings": True}, "float32", "none"),
        ("llama", {"tie_word_embeddings": False}, "float32", "none"),
        ("llama", {"tie_word_embeddings": True}, "float32", "int8"),
        ("llama", {"tie_word_embeddings": True}, "float16", "none"),
        ("llama", {"tie_word_embeddings": True}, "bfloat16", "none"),
        ("llama", {"tie_word_embeddings": False}, "bfloat16", "none"),
        ("list", {"tied": True}, "float32", "none"),
        ("list", {"tied": True}, "float32", "int8"),
        ("list", {"tied": False}, "float32", "none"),
    ],
)
def test_what_floats_take_is_told_from_their_headers(
    kind: str, changes: dict[str, Any], dtype: DType, quantize: Rounding, tmp_path: Path
) -> None:
    check_floats(listed(tmp_path, **changes) if kind == "list" else floats(kind, tmp_path, **changes), dtype, quantize)


def check_floats(directory: Path, dtype: DType = "float32", quantize: Rounding = "none") -> None:
    checkpoint = with_list(inspect(directory))
    model = registry.load(checkpoint, getattr(torch, dtype), tiny.CPU, max_position=64, int8=quantize == "int8")
    assert resident_bytes(checkpoint, dtype, quantize) == pytest.approx(tensor_bytes(model), rel=0.1)


@pytest.mark.parametrize("name", test_quantized.LAYOUTS)
def test_what_quantised_weights_take_is_told_from_their_headers(name: str, tmp_path: Path) -> None:
    checkpoint = inspect(test_quantized.quantized(name, tmp_path)[0])
    model = registry.load(checkpoint, torch.float32, tiny.CPU, max_position=16)
    held, told = tensor_bytes(model), resident_bytes(checkpoint, "float32")
    if test_quantized.LAYOUTS[name][2]:
        assert told == pytest.approx(held, rel=0.1)
    else:  # floats that 16 bits may hold
        assert 0.9 * held < told < 2 * held


_HELD = """
import re, sys
from pathlib import Path
import torch
from ssd.models import pairs, registry
from ssd.models.checkpoint import inspect
from ssd.models.head import with_list
from ssd.models.resident import Rounding, resident_bytes

def anonymous():
    return 1024 * int(re.search(r"Anonymous: +([0-9]+)", Path("/proc/self/smaps_rollup").read_text())[1])

small, large = (with_list(inspect(Path(folder))) for folder in sys.argv[1:])
registry.load(small, torch.float32, torch.device("cpu"), max_position=64)  # threads, libraries, kernels
before = anonymous()
model = registry.load(large, torch.float32, torch.device("cpu"), max_position=64)
print(anonymous() - before, resident_bytes(large, "float32"))
"""


def test_a_process_holds_what_is_predicted(tmp_path: Path) -> None:
    """A draft that predicts some rows of a large table: reading it takes several times the memory that it keeps."""
    folders = tmp_path / "small", tmp_path / "large"
    for folder, vocabulary in zip(folders, (VOCABULARY, 120_000), strict=True):
        write(folder, {"": "Q4_1", "token_embd": "Q6_K"}, True, vocabulary=vocabulary)
        save_file({"ids": torch.arange(vocabulary // 4)}, folder / "draft_vocab.safetensors")
    found = subprocess.run([sys.executable, "-c", _HELD, *folders], capture_output=True, text=True, check=True)
    held, predicted = map(int, found.stdout.split())
    assert held == pytest.approx(predicted, rel=0.1)


@pytest.mark.parametrize("family", RECURRENT)
def test_the_sizes_of_states_are_those_that_a_runner_allocates(family: str, tmp_path: Path) -> None:
    check_states(*RECURRENT[family], tmp_path)


def check_states(kind: str, knobs: dict[str, Any], folder: Path) -> None:
    directory = tiny.model(kind, folder, **knobs)
    cache, sizes = tiny.runner(directory).state_cache, ModelSizes.of(inspect(directory))
    assert cache is not None
    assert sizes.recurrent.state == sum(states[0].numel() for states in cache.states)
    assert sizes.recurrent.change == sum(kept.shape[1] for kept in cache.kept)
    assert len(sizes.stored) == tiny.runner(directory).model.shape.layers
