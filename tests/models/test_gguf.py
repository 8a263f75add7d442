"""GGUF files as models: logits by transformers' own reader, tokenizers by the ones they were made of, hostile files."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from ssd import LLM, SamplingParams
from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.law import Law
from ssd.models import checkpoint, hub
from ssd.models.gguf.header import read_header
from ssd.models.pull import BUILTIN
from tests.exactness.plain import Plain
from tests.models import ggufs, tiny, wheels
from tests.models.gguf_writer import add_tokenizer, finish, permute

pytestmark = pytest.mark.usefixtures("own_cache")

BPE = BUILTIN["smollm2-draft"].directory
KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # which gguf itself can write
TEXTS = (
    "def f(x):\n    return x**2  # naïve\n",
    "In 1984, 42% of  them\twere 中文 ¿verdad?",
    "<|im_start|>user\nHi<|im_end|>",
)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_checkpoint_rounded(kind: str, tmp_path: Path) -> None:
    """What the file was made of, its tables rounded as the type says, in transformers."""
    tiny.tokenizer(tmp_path)
    made_of = ggufs.write(tmp_path / "tiny.gguf", kind)
    weights = load_file(made_of / "model.safetensors")
    rounded = {name: ggufs.rounded(w, kind) if w.ndim == 2 else w for name, w in weights.items()}
    save_file(rounded, made_of / "model.safetensors", metadata={"format": "pt"})
    oracle = tiny.oracle(made_of)
    directory, text = hub.resolve(str(tmp_path / "tiny.gguf")), tiny.token_ids(60, 0, 300)
    logits = tiny.runner(directory).forward([Row(text, 0, range(16), len(text))])
    assert (logits - tiny.oracle_logits(oracle, text)).abs().max() <= 1e-4
    types = {info.dtype for info in checkpoint.inspect(directory).tensors.values() if len(info.shape) == 2}
    assert types == {kind}
    assert not list(directory.glob("*.safetensors"))


def test_a_folder_is_made_once_and_again_when_the_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    ggufs.write(file, tokenizer=tiny.tokenizer(tmp_path))
    first = hub.resolve(str(file))
    made = (first / "config.json").stat()
    assert hub.resolve(str(file)) == first and (first / "config.json").stat() == made
    found = checkpoint.inspect(first)
    os.utime(file, ns=(made.st_atime_ns, made.st_mtime_ns + 10**9))
    with pytest.raises(UsageError, match=r"tiny\.gguf has changed"):
        checkpoint.inspect(first)
    again = hub.resolve(str(file))
    assert again != first and checkpoint.inspect(again).digest == found.digest
    ggufs.write(file, tokenizer=tiny.tokenizer(tmp_path), seed=1)
    assert checkpoint.inspect(hub.resolve(str(file))).digest != found.digest
    file.unlink()
    with pytest.raises(UsageError, match=r"tiny\.gguf is gone"):
        checkpoint.inspect(first)
    assert not [path for path in first.parent.iterdir() if path.suffix == ".new"]


def test_a_pair_of_files_generates(tmp_path: Path) -> None:
    target, draft = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    tiny.tokenizer(tmp_path)
    made_of = ggufs.write(target)
    ggufs.write(draft, "Q8_0")
    asked = SamplingParams(max_tokens=20, ignore_eos=True)
    with LLM(str(target), [str(draft)], mode="sd", dtype="float32") as llm:  # which waits for the draft
        ours = llm.generate(["A tiny Llama"], [asked])[0]
    assert Plain(made_of).generate(ours.prompt_token_ids, Law(), asked) == ours.token_ids
    assert ours.metrics.mean_acceptance_length > 1


def test_rows_are_put_into_the_order_that_llama_cpp_defines() -> None:
    weight = np.random.default_rng(0).standard_normal((4 * 6, 8), np.float32)
    assert (permute(weight, 4) == wheels.interleaved(weight, 4)).all()


# -- tokenizers -------------------------------------------------------------------------------------------------------


def with_tokenizer(tmp_path: Path, pre: str, tokenizer: Path) -> Path:
    writer = gguf.GGUFWriter(tmp_path / "tokens.gguf", "llama")
    add_tokenizer(writer, tokenizer, pre)
    writer.add_chat_template("{{ messages[0].content }}")
    finish(writer)
    return tmp_path / "tokens.gguf"


def rebuilt(file: Path, directory: Path) -> Tokenizer:
    from ssd.models.gguf.header import read_header
    from ssd.models.gguf.tokenizer import write_tokenizer

    write_tokenizer(read_header(file), directory)
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def test_a_tokenizer_in_the_metadata_is_the_one_it_was_made_of(tmp_path: Path) -> None:
    ours, original = (
        rebuilt(with_tokenizer(tmp_path, "gpt-2", BPE), tmp_path),
        Tokenizer.from_file(str(BPE / "tokenizer.json")),
    )
    assert ours.get_vocab() == original.get_vocab()
    for text in TEXTS:
        ids = original.encode(text).ids
        assert ours.encode(text).ids == ids
        assert ours.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": [0, 2]}
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
    assert (tmp_path / "chat_template.jinja").read_text() == "{{ messages[0].content }}"


def test_digits_are_cut_one_by_one_where_the_file_says_so(tmp_path: Path) -> None:
    for pre, chunks in (("smollm", ["1", "9", "8", "4"]), ("gpt-2", ["1984"])):
        ours = rebuilt(with_tokenizer(tmp_path, pre, tiny.tokenizer(tmp_path)), tmp_path)
        assert [chunk for chunk, _ in ours.pre_tokenizer.pre_tokenize_str("1984")] == chunks


def test_a_tokenizer_of_another_kind_needs_a_file_beside_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'gpt2', 'chameleon'.*put the tokenizer\.json of the model beside it"):
        rebuilt(with_tokenizer(tmp_path, "chameleon", tiny.tokenizer(tmp_path)), tmp_path)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"llama__rope__scaling__type": "su"}, "rope scaling 'su'"),
        ({"llama__rope__scaling__type": "yarn"}, "lacks 'llama.rope.scaling.factor'"),
        ({"llama__rope__scaling__type": "linear"}, "lacks 'llama.rope.scaling.factor'"),
        ({"llama__embedding_length": "wide"}, "does not describe a model"),
        ({"llama__attention__head_count": 0.0}, "does not describe a model"),
        ({"llama__attention__head_count": float("nan")}, "does not describe a model|NaN"),
    ],
    ids=str,
)
def test_metadata_that_describes_no_model_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiny.tokenizer(tmp_path)
    ggufs.write(tmp_path / "tiny.gguf", **fields)
    with pytest.raises(UsageError, match=message):
        tiny.runner(hub.resolve(str(tmp_path / "tiny.gguf")))


_REFUSED_METADATA: list[tuple[str, Any, str]] = [
    ("llama.attention.causal", False, "llama.attention.causal False is not supported"),
    ("llama.attention.sliding_window", 4, "sliding_window 4 is not supported"),
    ("llama.logit_scale", 2.0, "logit_scale 2.0 is not supported"),
    ("llama.rope.scale_linear", 4.0, "scale_linear 4.0 is not supported"),
    ("llama.expert_count", 8, "expert_count 8 is not supported"),
    ("llama.rope.dimension_count", 8, "rope.dimension_count 8 is not supported: by the rest of the file it is 16"),
    ("llama.attention.value_length", 8, "value_length 8 is not supported: by the rest of the file it is 16"),
    ("llama.vocab_size", 7, "vocab_size 7 is not supported: by the rest of the file it is 300"),
    ("llama.block_count", 1, "block_count 1 is not supported: by the rest of the file it is 2"),
    ("llama.rope.freq_base", float("inf"), "does not describe a model"),
    *(
        (f"tokenizer.ggml.{end}_token_id", 300, f"{end}_token_id 300 is not one of 300")
        for end in ("bos", "eos", "eot")
    ),
    ("tokenizer.ggml.eos_token_id", "x", "eos_token_id 'x' is not one of 300 tokens"),
    ("tokenizer.ggml.eom_token_id", [1, 2], r"eom_token_id \[1, 2\] is not one of 300 tokens"),
    ("tokenizer.ggml.pre", ["gpt-2"], "put the tokenizer.json of the model beside it"),
    ("tokenizer.ggml.tokens", [1, 2], "the tokenizer in .* is broken"),
    ("tokenizer.ggml.merges", ["a"], "the tokenizer in .* is broken"),
    ("tokenizer.ggml.add_eos_token", True, "add_eos_token"),
    ("tokenizer.chat_template", 1, "the tokenizer in .* is broken"),
]


def _with_field(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any) -> Path:
    """A good file but for one field of its metadata, whatever its type."""
    write_header = gguf.GGUFWriter.write_header_to_file

    def spoilt(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0].pop(key, None)
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
        write_header(writer)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", spoilt)
    ggufs.write(tmp_path / "tiny.gguf", tokenizer=tiny.tokenizer(tiny.llama(tmp_path / "tokens", vocab_size=300)))
    return tmp_path / "tiny.gguf"


@pytest.mark.parametrize(("key", "value", "message"), _REFUSED_METADATA, ids=str)
def test_metadata_that_asks_for_what_is_not_done_is_refused(
    key: str, value: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Naming the file, in a line, and nothing is left in the cache."""
    file = _with_field(tmp_path, monkeypatch, key, value)
    with pytest.raises(UsageError, match=message) as caught:
        hub.resolve(str(file))
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)
    assert not list((tmp_path / "cache" / "gguf").glob("tiny-*"))


@pytest.mark.parametrize(
    ("key", "value"), [("llama.attention.causal", True), ("llama.expert_count", 0), ("llama.rope.scaling.factor", 1.0)]
)
def test_redundant_metadata_is_accepted(key: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = hub.resolve(str(_with_field(tmp_path, monkeypatch, key, value)))
    text = tiny.token_ids(30, 0, 300)
    logits = tiny.runner(directory).forward([Row(text, 0, range(16), len(text))])
    oracle = tiny.oracle(tmp_path / "tiny.from")
    assert (logits - tiny.oracle_logits(oracle, text)).abs().max() <= 1e-4


def test_a_factor_without_a_type_is_linear_as_for_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = hub.resolve(str(_with_field(tmp_path, monkeypatch, "llama.rope.scaling.factor", 4.0)))
    assert checkpoint.read_config(directory)["rope_parameters"]["rope_type"] == "linear"


@pytest.mark.parametrize("kind", ["IQ2_XS", "Q8_K", "TQ1_0"])
def test_other_types_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    ggufs.add_tensor(writer, "token_embd.weight", np.ones((4, 256), np.float32), "F32")
    finish(writer)
    content, number = (tmp_path / "x.gguf").read_bytes(), gguf.GGMLQuantizationType[kind]
    (tmp_path / "x.gguf").write_bytes(content.replace(*(struct.pack("<QQIQ", 256, 4, n, 0) for n in (0, number))))
    with pytest.raises(UsageError, match=rf"'token_embd\.weight' has type {kind}; F32, F16, BF16, Q4_0"):
        read_header(tmp_path / "x.gguf")


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def tensor(name: bytes, dims: list[int], start: int, kind: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, start)


def raw(
    *tensors: bytes, fields: tuple[bytes, ...] = (), data: int = 64, counts: tuple[int, int] | None = None
) -> bytes:
    """A GGUF with any header, of `data` zero bytes after it, and optionally a lie about how much is in it."""
    text = b"GGUF" + struct.pack("<IQQ", 3, *(counts or (len(tensors), len(fields)))) + b"".join((*fields, *tensors))
    return text + bytes(-len(text) % 32) + bytes(data)


def field(name: bytes, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


GOOD = (tensor(b"a", [8], 0), tensor(b"b", [4, 2], 32))
HOSTILE = {
    "empty": (b"", "truncated"),
    "other magic": (b"GGML" + bytes(60), "not a readable GGUF"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
    "version of other byte order": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
    "2^63 tensors": (raw(counts=(2**63, 0)), "no room for 9223372036854775808 entries"),
    "2^63 fields": (raw(counts=(0, 2**63)), "no room for 9223372036854775808 entries"),
    "long string": (raw(fields=(struct.pack("<Q", 2**60),)), "over 67108864"),
    "string past the end": (raw(fields=(struct.pack("<Q", 1000),)), "truncated"),
    "not UTF-8": (raw(fields=(field(b"\xff", 4, bytes(4)),)), "not UTF-8"),
    "field twice": (raw(fields=(field(b"x", 4, bytes(4)),) * 2), "field 'x' is there twice"),
    "unknown field type": (raw(fields=(field(b"x", 77, bytes(4)),)), "type 77"),
    "array without end": (
        raw(fields=(field(b"x", 9, struct.pack("<IQ", 0, 2**60)),)),
        "no room for 115292150460684",
    ),
    "strings without end": (raw(fields=(field(b"x", 9, struct.pack("<IQ", 8, 2**60)),)), "no room for"),
    "array of arrays": (raw(fields=(field(b"x", 9, struct.pack("<IQ", 9, 1)),)), "type 9"),
    "alignment 0": (raw(fields=(field(b"general.alignment", 4, bytes(4)),)), "no power of two"),
    "alignment 48": (raw(fields=(field(b"general.alignment", 4, struct.pack("<I", 48)),)), "no power of two"),
    "alignment as text": (raw(fields=(field(b"general.alignment", 8, string(b"32")),)), "no power of two"),
    "tensor twice": (raw(GOOD[0], GOOD[0]), "tensor 'a' is there twice"),
    "overlap": (raw(GOOD[0], tensor(b"b", [8], 0)), "'b' overlaps"),
    "offset past the end": (raw(tensor(b"a", [8], 96)), "truncated: tensor 'a'"),
    "offset 2^64 - 32": (raw(tensor(b"a", [8], 2**64 - 32)), "truncated: tensor 'a'"),
    "offset between": (raw(tensor(b"a", [8], 7)), "not aligned"),
    "data cut short": (raw(*GOOD, data=63), "truncated: tensor 'b'"),
    "no dims": (raw(tensor(b"a", [], 0)), "0 dimensions"),
    "a million dims": (raw(string(b"a") + struct.pack("<I", 1_000_000)), "1000000 dimensions"),
    "dims whose product wraps": (raw(tensor(b"a", [2**32, 2**32], 0)), "truncated: tensor 'a'"),
    "dim 0": (raw(tensor(b"a", [0, 8], 0)), "bad shape"),
    "half a block": (raw(tensor(b"a", [16], 0, 8)), "'a' of Q8_0 has a bad shape"),
    "unknown type": (raw(tensor(b"a", [8], 0, 4096)), "type 4096"),
}


def test_the_good_one_passes(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(raw(*GOOD, fields=(field(b"x", 9, struct.pack("<IQ", 4, 2) + bytes(8)),)))
    read_header(tmp_path / "x.gguf")


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(name: str, tmp_path: Path) -> None:
    content, message = HOSTILE[name]
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        hub.resolve(str(tmp_path / "x.gguf"))
    assert str(tmp_path / "x.gguf") in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("counts", "fields", "message"),
    [
        ((0, 1), (field(b"x", 9, struct.pack("<IQ", 8, 10**10)),), "more than 1048576 entries"),
        ((0, 1), (field(b"x", 9, struct.pack("<IQ", 0, 10**10)),), "more than 1048576 entries"),
        ((10**10, 0), (), "more than 1048576 entries"),
        ((0, 10**10), (), "more than 1048576 entries"),
        ((0, 5), tuple(field(b"%d" % n, 8, struct.pack("<Q", 64 << 20)) for n in range(5)), "longer than 268435456"),
    ],
)
def test_a_file_with_holes_has_no_room_for_what_no_model_has(
    counts: tuple[int, int], fields: tuple[bytes, ...], message: str, tmp_path: Path
) -> None:
    """A terabyte that takes a page of the disk; the strings of the last one lie between pages."""
    file = tmp_path / "x.gguf"
    with file.open("wb") as stream:
        stream.write(raw(fields=fields[:1], counts=counts, data=0).rstrip(b"\0") if len(fields) < 2 else b"")
        if len(fields) > 1:
            stream.write(b"GGUF" + struct.pack("<IQQ", 3, *counts))
            for part in fields:
                stream.write(part)
                stream.seek(64 << 20, 1)
        stream.truncate(10**12)
    with pytest.raises(UsageError, match=message):
        read_header(file)


def test_every_truncation_of_a_good_file_is_refused(tmp_path: Path) -> None:
    whole = raw(*GOOD, fields=(field(b"x", 8, string(b"text")),))
    for length in range(len(whole)):
        (tmp_path / "x.gguf").write_bytes(whole[:length])
        with pytest.raises(UsageError, match="truncated"):
            read_header(tmp_path / "x.gguf")
