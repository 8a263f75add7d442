"""Checkpoint checks: a good folder passes, every hostile one is refused with a message that names the cause."""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from ssd.cli.main import main
from ssd.errors import UsageError
from ssd.models import checkpoint, pairs
from ssd.models.checkpoint import LIST_FILE
from ssd.models.header import check_safetensors
from ssd.models.pull import BUILTIN
from ssd.models.vocabularies import vocabulary_of
from tests.models import tiny
from tools.distill.layouts import quantization_config

Entries = dict[str, Any]


def entry(dtype: str, shape: list[Any], start: int, stop: int) -> Entries:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def raw(header: Any, data: int, length: int | None = None) -> bytes:
    """A safetensors file with any header, `data` zero bytes, and optionally a lie about the header's length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


GOOD = {"a": entry("F32", [2, 2], 0, 16), "b": entry("BF16", [3], 16, 22)}

HOSTILE = {
    "empty file": (b"", "truncated"),
    "seven bytes": (b"\0" * 7, "truncated"),
    "data cut short": (raw(GOOD, 21), "truncated: header promises 159 bytes, file has 158"),
    "header longer than the file": (raw(GOOD, 22, 1000), "truncated: header promises 1008 bytes, file has 159"),
    "header over the bound": (raw(GOOD, 22, 2**63), "over 100000000"),
    "header larger than any memory": (raw(GOOD, 22, 2**46), "over 100000000"),
    "eight bytes of ones": (b"\xff" * 8, "over 100000000"),
    "bytes after the last tensor": (raw(GOOD, 23), "after its last tensor"),
    "not JSON": (raw(b"{nope", 0), "bad JSON"),
    "not UTF-8": (raw(b'{"\xff": 1}', 0), "bad JSON"),
    "nested too deep": (raw(b"[" * 200_000, 0), "bad JSON"),
    "a list": (raw([], 0), "expected a JSON object, found list"),
    "one name twice": (raw(b'{"a": 1, "a": 2}', 0), "twice"),
    "overlap": (raw({"a": GOOD["a"], "b": entry("U8", [8], 8, 16)}, 16), "'b' overlaps"),
    "gap": (raw({"a": GOOD["a"], "b": entry("U8", [8], 24, 32)}, 32), "'b' follows a gap"),
    "gap at the front": (raw({"a": entry("U8", [8], 8, 16)}, 16), "'a' follows a gap"),
    "dims do not match bytes": (raw({"a": entry("F32", [2, 3], 0, 16)}, 16), "needs 24 bytes, has 16"),
    "dims whose product wraps": (raw({"a": entry("F32", [2**32, 2**32], 0, 0)}, 0), "needs 73786976294838206464"),
    "a million dims": (raw({"a": entry("U8", [2**61] * 1_000_000, 0, 0)}, 0), "bad shape"),
    "negative dim": (raw({"a": entry("U8", [-1, -8], 0, 8)}, 8), "bad shape"),
    "fractional dim": (raw({"a": entry("U8", [8.0], 0, 8)}, 8), "bad shape"),
    "boolean dim": (raw({"a": entry("U8", [True], 0, 1)}, 1), "bad shape"),
    "unknown dtype": (raw({"a": entry("F4096", [8], 0, 8)}, 8), "unknown dtype 'F4096'"),
    "dtype is no string": (raw({"a": entry(["F32"], [2], 0, 8)}, 8), "unknown dtype"),  # type: ignore[arg-type]
    "offsets reversed": (raw({"a": entry("U8", [8], 8, 0)}, 8), "bad offsets"),
    "offset negative": (raw({"a": entry("U8", [8], -8, 0)}, 8), "bad offsets"),
    "three offsets": (raw({"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8, 8]}}, 8), "bad offsets"),
    "entry without shape": (raw({"a": {"dtype": "U8", "data_offsets": [0, 8]}}, 8), "malformed"),
    "metadata that is a list": (raw(GOOD | {"__metadata__": ["pt"]}, 22), "__metadata__ is no map of strings"),
    "metadata with a number": (raw(GOOD | {"__metadata__": {"a": 1}}, 22), "__metadata__ is no map of strings"),
    "entry is a number": (raw({"a": 8}, 8), "malformed"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_safetensors_are_refused(name: str, tmp_path: Path) -> None:
    content, message = HOSTILE[name]
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        check_safetensors(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.llama(tmp_path_factory.mktemp("models") / "small")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_list_of_a_drafts_ids_is_refused_by_every_command(name: str, small: Path, tmp_path: Path) -> None:
    """Whatever length it says, no more is read of it than there is."""
    draft = tmp_path / "draft"
    shutil.copytree(small, draft)
    (draft / LIST_FILE).write_bytes(HOSTILE[name][0])
    launch = ["launch", "--target", str(small), "--draft", str(draft), "--dry-run"]
    for asked in (launch, ["models", str(draft)]):
        result = CliRunner().invoke(main, asked)
        assert (result.exit_code, result.stdout) == (2, "")
        (said,) = result.stderr.splitlines()
        assert str(draft / LIST_FILE) in said


def test_every_truncation_of_a_good_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    whole = raw(GOOD, 22)
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(UsageError, match="truncated"):
            check_safetensors(file)


def test_a_file_of_the_library_is_read_as_the_library_wrote_it(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    arrays = {"w": np.zeros((3, 5), np.float16), "empty": np.zeros((0, 4), np.float32), "scalar": np.array(1, np.int64)}
    save_file(arrays, file, metadata={"format": "np"})
    found = check_safetensors(file)
    assert {name: info.shape for name, info in found.items()} == {"w": (3, 5), "empty": (0, 4), "scalar": ()}
    assert {name: info.nbytes for name, info in found.items()} == {name: array.nbytes for name, array in arrays.items()}
    assert found["w"].dtype == "F16" and found["w"].file == file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no config.json"),
        ("", "bad JSON"),
        ("{", "bad JSON"),
        ("[1]", "expected a JSON object"),
        ('{"auto_map": {"AutoModel": "evil.Model"}}', "auto_map"),
        ('{"text_config": {}}', "text_config"),
        ('{"model_type": "gemma3", "text_config": 3}', "text_config"),
        ('{"model_type": "gemma3", "text_config": {"auto_map": {"AutoModel": "evil.Model"}}}', "auto_map"),
        ('{"model_type": "gemma3", "text_config": {"text_config": {}, "quantization_config": {}}}', "quantised"),
        ('{"rms_norm_eps": NaN}', "NaN is no number"),
        ('{"rope_theta": -Infinity}', "-Infinity is no number"),
        ('{"rope_theta": 1e999}', "1e999 is no number"),
        ('{"vocab_size": %s}' % ("9" * 5000), "bad JSON"),
    ],
)
def test_bad_configs_are_refused(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        checkpoint.read_config(tmp_path)


def quantized(**changes: Any) -> dict[str, Any]:
    """A config of `compressed-tensors`, with other fields of it or of its only group's weights."""
    found = quantization_config(8)
    weights = found["config_groups"]["group_0"]["weights"]
    weights |= {name: value for name, value in changes.items() if name in weights}
    return found | {name: value for name, value in changes.items() if name not in weights}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (quantized(quant_method="quanto"), "quant_method 'quanto' is not read"),
        (quantized(format="float-quantized"), "type is 'int', not 'float'"),
        (quantized(format="nvfp4-pack-quantized"), "format is 'nvfp4-pack-quantized', not"),
        (quantized(num_bits=4), "num_bits is 4, not 8"),
        (quantized(num_bits=True), "num_bits is True, not 8"),
        (quantized(type="float"), "type is 'float'"),
        (quantized(strategy="block"), "strategy is 'block', not"),
        (quantized(output_activations={"num_bits": 8}), "it has output_activations"),
        (quantized(kv_cache_scheme={"num_bits": 8}), "it has kv_cache_scheme"),
        (quantized(config_groups={}), "config_groups is no object with groups"),
        (quantized(config_groups={"a": 3}), "a part of it is no object"),
        (quantized(config_groups={"a": {"format": "pack-quantized", "weights": {"num_bits": 3}}}), "num_bits is 3"),
        (quantized(config_groups={"a": {"weights": None}}), "a part of it is no object"),
        (
            quantized(config_groups={"a": {"weights": {}, "output_activations": {"num_bits": 8}}}),
            "it has output_activations",
        ),
        ("int8", "it is no object"),
    ],
)
def test_weights_quantised_in_other_ways_are_refused(found: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": found}))
    with pytest.raises(
        UsageError, match=f"config.json has quantization_config: quantised weights are not.*: {message}"
    ):
        checkpoint.read_config(tmp_path)


def test_weights_in_8_and_4_bits_are_not_refused(tmp_path: Path) -> None:
    for found in (
        quantized(),
        quantization_config(4, 64),
        quantized(format="int-quantized", type=None, symmetric=None),
        None,
    ):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": found}))
        assert checkpoint.read_config(tmp_path)["quantization_config"] == found


def sharded(directory: Path) -> dict[str, Any]:
    """Two shards with one tensor each, and their index."""
    save_file({"a": np.ones(4, np.float32)}, directory / "one.safetensors")
    save_file({"b": np.ones(2, np.float32)}, directory / "two.safetensors")
    (directory / "config.json").write_text('{"vocab_size": 8}')
    return {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}


def write_index(directory: Path, index: dict[str, Any]) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    write_index(tmp_path, sharded(tmp_path))
    found = checkpoint.inspect(tmp_path)
    assert {name: info.file.name for name, info in found.tensors.items()} == sharded(tmp_path)["weight_map"]
    assert found.nbytes == 24 and found.config == {"vocab_size": 8}


def _shard_gone(directory: Path, index: dict[str, Any]) -> None:
    (directory / "two.safetensors").unlink()


def _shard_elsewhere(directory: Path, index: dict[str, Any]) -> None:
    index["weight_map"]["b"] = "../two.safetensors"


def _tensor_gone(directory: Path, index: dict[str, Any]) -> None:
    index["weight_map"]["c"] = "two.safetensors"


def _tensor_in_another_shard(directory: Path, index: dict[str, Any]) -> None:
    index["weight_map"] |= {"a": "two.safetensors", "b": "one.safetensors"}


def _tensor_twice(directory: Path, index: dict[str, Any]) -> None:
    save_file({"a": np.ones(4, np.float32), "b": np.ones(2, np.float32)}, directory / "two.safetensors")


def _no_map(directory: Path, index: dict[str, Any]) -> None:
    del index["weight_map"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_shard_gone, "shard two.safetensors is missing"),
        (_shard_elsewhere, "'../two.safetensors' is not the name of a file beside it"),
        (_tensor_gone, "tensor 'c' is not in two.safetensors"),
        (_tensor_in_another_shard, "tensor 'a' is not in two.safetensors"),
        (_tensor_twice, "tensor 'a' is in more than one file"),
        (_no_map, "no weight_map"),
    ],
)
def test_bad_shards_are_refused(spoil: Callable[[Path, dict[str, Any]], None], message: str, tmp_path: Path) -> None:
    index = sharded(tmp_path)
    spoil(tmp_path, index)
    write_index(tmp_path, index)
    with pytest.raises(UsageError, match=re.escape(message)):
        checkpoint.inspect(tmp_path)


def test_a_folder_without_safetensors_is_refused_unless_weights_are_not_wanted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(UsageError, match=r"no model\.safetensors"):
        checkpoint.inspect(tmp_path)
    assert checkpoint.inspect(tmp_path, weights=False).tensors == {}


def model(directory: Path, values: np.ndarray, config: str = '{"vocab_size": 8}') -> checkpoint.Checkpoint:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(config)
    save_file({"w": values}, directory / "model.safetensors")
    return checkpoint.inspect(directory)


def test_the_digest_tells_models_apart_and_not_folders(tmp_path: Path) -> None:
    ones = np.ones(100_000, np.float32)
    digest = model(tmp_path / "a", ones).digest
    assert model(tmp_path / "b", ones).digest == digest
    assert model(tmp_path / "c", ones * 2).digest != digest
    assert model(tmp_path / "d", ones.reshape(100, 1000)).digest != digest
    assert model(tmp_path / "e", ones, '{"vocab_size": 9}').digest != digest


def words(directory: Path, vocabulary: dict[str, int], model_type: str = "WordLevel") -> None:
    tokenizer = {"version": "1.0", "added_tokens": [], "model": {"type": model_type, "vocab": vocabulary}}
    tokenizer["model"]["unk_token"] = "?"  # type: ignore[index]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[checkpoint.Checkpoint, checkpoint.Checkpoint]:
    return model(tmp_path / "t", np.ones(4)), model(tmp_path / "d", np.ones(4), '{"vocab_size": 16}')


Pair = tuple[checkpoint.Checkpoint, checkpoint.Checkpoint]


def test_a_pair_with_one_vocabulary_is_accepted_in_any_order_and_padding(pair: Pair) -> None:
    words(pair[0].directory, {"?": 0, "a": 1, "b": 2})
    words(pair[1].directory, {"b": 2, "a": 1, "?": 0})
    assert pairs.check_pair(*pair) == pair[1]


def test_a_pair_with_tokens_swapped_is_translated(pair: Pair) -> None:
    words(pair[0].directory, {"?": 0, "a": 1, "b": 2})
    words(pair[1].directory, {"?": 0, "a": 2, "b": 1})
    found = pairs.check_pair(*pair).translation
    assert found is not None and (found.known, found.own[:3], found.shared) == (16, [0, 2, 1], [0, 1, 2])


def test_without_tokenizers_the_vocabulary_sizes_decide(pair: Pair) -> None:
    pairs.check_pair(pair[0], pair[0])
    words(pair[0].directory, {"?": 0})
    with pytest.raises(UsageError, match="vocabularies of 8 and 16 tokens"):
        pairs.check_pair(*pair)


def sharing(directory: Path, names: object) -> checkpoint.Checkpoint:
    return model(directory, np.ones(2), json.dumps({"vocab_size": 8, pairs.SHARED: names}))


def test_a_draft_borrows_what_its_config_names(tmp_path: Path) -> None:
    target = model(tmp_path / "target", np.ones(3))
    save_file({"own": np.ones(2)}, tmp_path / "target" / "model.safetensors")
    target = checkpoint.inspect(target.directory)
    whole = pairs.borrowed(sharing(tmp_path / "draft", ["own"]), target)
    assert {name: info.file.parent.name for name, info in whole.tensors.items()} == {"w": "draft", "own": "target"}
    plain = model(tmp_path / "plain", np.ones(1))
    assert pairs.borrowed(plain, target) == plain


@pytest.mark.parametrize(
    ("names", "message"), [(["x"], "shares x with its target, which .*target lacks"), ("w", "list")]
)
def test_what_a_target_cannot_lend_is_told(names: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        pairs.borrowed(sharing(tmp_path / "draft", names), model(tmp_path / "target", np.ones(1)))


def test_without_a_usable_vocabulary_size_the_config_is_named(pair: Pair, tmp_path: Path) -> None:
    odd = model(tmp_path / "odd", np.ones(4), '{"vocab_size": "8"}')
    with pytest.raises(UsageError, match=r"odd/config\.json: vocab_size"):
        pairs.check_pair(odd, odd)


def test_a_smaller_head_has_a_size(pair: Pair, tmp_path: Path) -> None:
    for size in ("-5", "0", "null", "true"):
        odd = model(tmp_path / f"odd{size}", np.ones(4), f'{{"vocab_size": 8, "draft_vocab_size": {size}}}')
        with pytest.raises(UsageError, match=r"config\.json: draft_vocab_size must be a positive number"):
            pairs.check_pair(pair[0], odd)


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    assert vocabulary_of(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match=r"cannot read .*tokenizer\.json"):
        vocabulary_of(tmp_path)


def test_the_packaged_draft_passes() -> None:
    draft = checkpoint.inspect(BUILTIN["smollm2-draft"].directory)
    assert draft.config[pairs.SHARED] == ["model.embed_tokens.weight"]
    assert draft.nbytes <= 60 << 20 and draft.config[pairs.SHARED][0] not in draft.tensors
    vocabulary = vocabulary_of(draft.directory)
    assert vocabulary is not None and vocabulary["\uffff<|im_end|>"] == 2
    pairs.check_pair(draft, draft)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a.weight_scale": None}, "a.weight_scale is missing"),
        ({"a.weight_scale": np.ones((4, 3), np.float32)}, "weight_scale does not fit .* 32 inputs are not 3 groups"),
        ({"a.weight_scale": np.ones((5, 2), np.float32)}, r"weight_scale of shape \(5, 2\) does not fit"),
        ({"a.weight_g_idx": np.zeros(31, np.int32)}, r"a.weight_g_idx of shape \(31,\)"),
        ({"a.weight": np.ones((4, 32), np.float32)}, "both a.weight and a.weight_packed"),
        ({"a.weight_packed": np.ones((4, 4), np.int64)}, "a.weight_packed must be a matrix of I32"),
    ],
)
def test_weights_in_4_bits_whose_parts_do_not_fit_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    whole = {"a.weight_packed": np.ones((4, 4), np.int32), "a.weight_scale": np.ones((4, 2), np.float32)}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization_config(4, 16)}))
    save_file(whole, tmp_path / "model.safetensors")
    info = checkpoint.inspect(tmp_path).tensors["a.weight"]
    assert (info.shape, info.nbytes) == ((4, 32), 64 + 32)
    parts = {name: part for name, part in (whole | changes).items() if part is not None}
    save_file(parts, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=message):
        checkpoint.inspect(tmp_path)
