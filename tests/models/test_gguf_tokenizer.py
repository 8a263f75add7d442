"""Tokenizers rebuilt from the metadata of a GGUF: ids and text of small ones built the way of each family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ssd.errors import UsageError
from ssd.models.gguf.header import read_header
from ssd.models.gguf.tokenizer import write_tokenizer
from tests.models.gguf_writer import add_fields, finish

HARD = [
    *("", " ", "   ", "a", " a", "  a ", "a  b   c", "\t\tx\t", "a\u00a0b", "\r\n\r\nx\r\n", "\n\n\n\ny", "x \n \n y"),
    *("1", "12", "123", "1234", "12345 67", "٣٤٥ ½ Ⅻ", "it's I'M they'LL we'd O'Neil 'S", "don\u2019t"),
    *(
        "é e\u0301 ü u\u0308 \u1e9b\u0323",
        "한국어 \u1112\u1161\u11ab",
        "हिन्दी ภาษาไทย العربية",
        "日本語のテキスト。漢字",
    ),
    *("👩\u200d👩\u200d👧\u200d👦🏽 🇩🇪", "\x00\x01\x7f", "\ufeffx\u200b", "def f(x):\n    return x/2 // y\n"),
    *("<|im_start|>user\nhi<|im_end|>", "<end_of_turn>a<eot> <|im_end", "<0x41> <unk> ▁a ▁▁", "CamelCaseHTTPServer"),
    *("!!! ... --- ?!\n\n", "the the the quick brown hello", "\u2028x\u0085y"),
]
CORPUS = [
    *HARD,
    *(
        "the quick brown fox 12 123 it's don't They'LL hello world\n" * 3,
        "    return the value 1984 HTTP\n\n",
        "é ü 日本",
    ),
]
CONTROL, USER, BYTE = 3, 4, 6
# As in the tokenizer.json of Qwen2.5 and of Llama 3.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)


def byte_level(pattern: str | None, nfc: bool = False, digits: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    steps += [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(False, use_regex=not pattern)])
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet))
    return tokenizer


def whole_pieces(pattern: str) -> Tokenizer:
    """A tokenizer with a token that no merges make, as Llama 3 has."""
    saved = json.loads(byte_level(pattern).to_str())
    assert "Ġhello" in saved["model"]["vocab"]
    saved["model"]["merges"] = [merge for merge in saved["model"]["merges"] if "".join(merge) != "Ġhello"]
    saved["model"]["ignore_merges"] = True
    return Tokenizer.from_str(json.dumps(saved))


def sentencepiece(prefix: bool) -> tuple[Tokenizer, list[tuple[str, float, int]]]:
    """The form of Llama 2 (with a prefix) or of Gemma, and its tokens with scores and types."""
    tokens = [("<unk>", 0.0, 2), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    tokens += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    runs = [] if prefix else ["▁" * n for n in range(2, 6)] + ["\n" * n for n in range(2, 5)]
    tokens += [(run, -1000.0, USER) for run in runs]
    trainer = trainers.BpeTrainer(vocab_size=220, limit_alphabet=60)
    base = Tokenizer(models.BPE())
    base.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    base.train_from_iterator([text.replace("\n", " ") for text in CORPUS], trainer)
    known = json.loads(base.to_str())["model"]
    merged = ["".join(merge) for merge in known["merges"]]
    singles = [text for text in known["vocab"] if len(text) == 1]
    singles += [] if prefix else ["\n"]
    written = {text for text, *_ in tokens}
    words = [text for text in dict.fromkeys(merged) if text not in written]
    tokens += [(word, -float(rank), 1) for rank, word in enumerate(words)]
    tokens += [(text, -float(len(words) + rank), 1) for rank, text in enumerate(singles) if text not in written]
    vocabulary = {text: index for index, (text, *_) in enumerate(tokens)}
    merges = []
    for text in [*sorted(runs, key=len), *words]:
        cuts = [(text[:at], text[at:]) for at in range(1, len(text))]
        found = [cut for cut in cuts if cut[0] in vocabulary and cut[1] in vocabulary]
        merges += sorted(found, key=lambda cut: -len(cut[0]))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefix else replace
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer, tokens


def write(tmp_path: Path, fields: dict[str, Any]) -> Path:
    """A GGUF of nothing but metadata."""
    writer = gguf.GGUFWriter(tmp_path / "tokens.gguf", "llama")
    add_fields(writer, fields)
    finish(writer)
    return tmp_path / "tokens.gguf"


def rebuilt(tmp_path: Path, fields: dict[str, Any]) -> Tokenizer:
    write_tokenizer(read_header(write(tmp_path, fields)), tmp_path)
    return Tokenizer.from_file(str(tmp_path / "tokenizer.json"))


def bpe_fields(tokenizer: Tokenizer, pre: str, **others: Any) -> dict[str, Any]:
    """Adds special tokens to `tokenizer` -> the metadata of it."""
    added = {"<|endoftext|>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "<eot>": USER}
    tokenizer.add_tokens([AddedToken(text, special=of == CONTROL, normalized=False) for text, of in added.items()])
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]
    fields = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "merges": merges,
        "token_type": [added.get(token, 1) for token in tokens],
        "bos_token_id": vocabulary["<|endoftext|>"],
        "eos_token_id": vocabulary["<|endoftext|>"],
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (fields | others).items()}


def assert_equal(ours: Tokenizer, theirs: Tokenizer) -> None:
    for text in HARD:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip), text


@pytest.mark.parametrize(
    ("pre", "tokenizer"),
    [
        ("gpt-2", lambda: byte_level(None)),
        ("smollm", lambda: byte_level(None, digits=True)),
        ("qwen2", lambda: byte_level(QWEN2, nfc=True)),
        ("llama-bpe", lambda: whole_pieces(LLAMA3)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_byte_level_bpe_gives_the_ids_of_its_family(pre: str, tokenizer: Any, tmp_path: Path) -> None:
    theirs = tokenizer()
    ours = rebuilt(tmp_path, bpe_fields(theirs, pre))
    assert_equal(ours, theirs)
    starts = theirs.token_to_id("<|endoftext|>")
    assert (ours.encode("a").ids[0] == starts) == (pre == "llama-bpe")
    ends = json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    assert ends == sorted([starts, theirs.token_to_id("<|im_end|>")])


@pytest.mark.parametrize("prefix", [True, False], ids=["llama-2", "gemma"])
def test_sentencepiece_gives_the_ids_of_its_family(prefix: bool, tmp_path: Path) -> None:
    theirs, tokens = sentencepiece(prefix)
    ends = ("<|im_end|>", "<end_of_turn>")  # special, whatever type the metadata gives them
    marked = [(text, of) for text, _, of in tokens if of in (2, 3, 4) or text in ends]
    theirs.add_tokens([AddedToken(text, special=of != USER, normalized=False) for text, of in marked])
    ours = rebuilt(tmp_path, spm_fields(tokens, add_space_prefix=prefix))
    assert_equal(ours, theirs)
    assert ours.encode("a").ids[0] == 1
    assert rebuilt(tmp_path, spm_fields(tokens, add_bos_token=False)).encode("a").ids[0] != 1


def spm_fields(tokens: list[tuple[str, float, int]], **others: Any) -> dict[str, Any]:
    fields = {
        "model": "llama",
        # llama.cpp's converter writes runs of spaces as such
        "tokens": [text.replace("▁", " ") if of == USER else text for text, _, of in tokens],
        "scores": [score for _, score, _ in tokens],
        "token_type": [of for *_, of in tokens],
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (fields | others).items()}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokens", "a", "tokens is no list"),
        ("merges", ["a zz"], "merges: 'a zz'"),
        ("merges", ["a"], "merges: 'a'"),
        ("merges", None, "merges is no list"),
        ("token_type", [1], "token_type has 1 entries"),
        ("unknown_token_id", 10**6, "unknown_token_id 1000000 is not one of"),
        ("pre", "bloom", "'bloom'.*put the tokenizer.json"),
    ],
    ids=str,
)
def test_broken_metadata_is_refused_by_field(key: str, value: Any, message: str, tmp_path: Path) -> None:
    fields = bpe_fields(byte_level(None), "gpt-2") | {f"tokenizer.ggml.{key}": value}
    with pytest.raises(UsageError, match=message):
        rebuilt(tmp_path, fields)


def test_broken_scores_templates_and_duplicates_are_refused(tmp_path: Path) -> None:
    tokens = sentencepiece(True)[1]
    fields = spm_fields(tokens)
    with pytest.raises(UsageError, match="tokens has '</s>' twice"):
        rebuilt(tmp_path, spm_fields([*tokens, tokens[2]]))
    for key, value in (("tokenizer.ggml.scores", [0.0]), ("tokenizer.chat_template", 1)):
        with pytest.raises(UsageError, match=key):
            rebuilt(tmp_path, fields | {key: value})
