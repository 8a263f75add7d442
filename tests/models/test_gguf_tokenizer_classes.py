"""Tokenizers rebuilt from a GGUF's metadata beside the classes in which transformers has those of the families."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import GemmaTokenizer, LlamaTokenizer, Qwen2Tokenizer

from ssd.models.gguf.header import read_header
from ssd.models.gguf.tokenizer import write_tokenizer
from tests.models.gguf_writer import add_fields, finish

TEXTS = [
    "",
    " ",
    "   ",
    "Hello, World! It's 12345 o'clock; we'LL see. DON'T",
    " leading and trailing  ",
    "tabs\tand\r\nlines\n\n\nand\n \n  more",
    "1 22 333 4444 55555 3.14 1,000,000 ½ ٣٤ 五",
    "naïve café e\u0301 n\u0303 Å ﬁ ﷺ",
    "日本語のテキスト 中文 한국어 ไทย हिन्दी עברית العربية",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 😀😀",
    "a\u00a0b\u2003c\u200bd\u3000e",
    "\x00\x01\x7f control",
    "def f(x):\n    return x**2  # comment\n\n\tif x: pass",
    "<|im_start|>user\nhi<|im_end|>\n<s></s><bos><unk> <start_of_turn>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "CamelCaseWords HTTPServer iPhone",
    "https://example.org/a?b=c&d=%20#x",
    "…—“quotes” ‘x’ «y» (z) [w] {v}",
]
CORPUS = [*TEXTS * 3, *(Path(__file__).parents[2] / "docs" / "algorithm.md").read_text().splitlines()]
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def spaces(text: str) -> str:
    return text.replace(" ", "▁")


@cache
def byte_level(pattern: str, nfc: bool) -> dict[str, Any]:
    """The vocabulary and merges of a byte-level BPE trained on pieces of this pattern."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC() if nfc else None
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, special_tokens=CONTROLS, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    found: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return found


@cache
def pieces() -> tuple[tuple[str, float, int], ...]:
    """A SentencePiece BPE: (text, score, kind) of every token; a merged one's score is its place among the merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁*[^▁\n]+|▁+|\n+"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=700, limit_alphabet=150, show_progress=False)
    tokenizer.train_from_iterator([f" {line}" for line in CORPUS], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merged = ["".join(merge) for merge in model["merges"]]
    single = [token for token in model["vocab"] if len(token) == 1]
    found = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("<bos>", 0.0, 3), ("<start_of_turn>", 0.0, 3)]
    found += [("<end_of_turn>", 0.0, 1), ("<table>", 0.0, 4)] + [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    found += [(token, -float(at), 1) for at, token in enumerate(dict.fromkeys(merged)) if len(token) > 1]
    return (*found, *((token, -1e4 - at, 1) for at, token in enumerate(single)))


def written(tmp_path: Path, model: str, tokens: list[str], kinds: list[int], **fields: Any) -> Path:
    """A GGUF of nothing but a tokenizer."""
    writer = gguf.GGUFWriter(tmp_path / "tokens.gguf", "llama")
    others = {"general.name": fields.pop("name", None), "tokenizer.chat_template": fields.pop("template", None)}
    fields |= {"model": model, "tokens": tokens, "token_type": kinds}
    add_fields(writer, others | {f"tokenizer.ggml.{name}": value for name, value in fields.items()})
    finish(writer)
    return tmp_path / "tokens.gguf"


def rebuilt(file: Path) -> Tokenizer:
    write_tokenizer(read_header(file), file.parent)
    return Tokenizer.from_file(str(file.parent / "tokenizer.json"))


def of_bytes(tmp_path: Path, pre: str, model: dict[str, Any], **fields: Any) -> Path:
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = [3 if token in CONTROLS else 1 for token in tokens]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return written(tmp_path, "gpt2", tokens, kinds, pre=pre, merges=merges, **fields)


def of_pieces(tmp_path: Path, **fields: Any) -> Path:
    texts, scores, kinds = (list(column) for column in zip(*pieces(), strict=True))
    given = {"scores": scores, "unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | fields
    return written(tmp_path, "llama", texts, kinds, **given)


def assert_same(ours: Tokenizer, original: Tokenizer) -> None:
    for text in TEXTS:
        ids = original.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        for special in (False, True):
            assert ours.decode(ids, skip_special_tokens=special) == original.decode(ids, skip_special_tokens=special)


def test_qwen_2(tmp_path: Path) -> None:
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    model = byte_level(PRETOKENIZE_REGEX, nfc=True)
    merges = [tuple(merge) for merge in model["merges"]]
    original = Qwen2Tokenizer(vocab=model["vocab"], merges=merges).backend_tokenizer
    original.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROLS])
    ours = rebuilt(of_bytes(tmp_path, "qwen2", model, bos_token_id=0, eos_token_id=2, add_bos_token=False))
    assert_same(ours, original)
    assert ours.encode("hi").ids == ours.encode("hi", add_special_tokens=False).ids
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": [0, 2]}


def test_gemma(tmp_path: Path) -> None:
    vocabulary = {text: at for at, (text, _, _) in enumerate(pieces())}
    ours = rebuilt(of_pieces(tmp_path, bos_token_id=3, add_space_prefix=False))
    merges = [tuple(merge) for merge in json.loads(ours.to_str())["model"]["merges"]]
    special = {"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "</s>", "pad_token": "<s>", "mask_token": "<s>"}
    original = GemmaTokenizer(vocab=vocabulary, merges=merges, **special).backend_tokenizer
    original.add_special_tokens([text for text, _, kind in pieces() if kind in (2, 3)] + ["<end_of_turn>"])
    original.add_tokens([AddedToken("<table>", normalized=False)])
    assert_same(ours, original)
    assert ours.encode("hi").ids == [3, *ours.encode("hi", add_special_tokens=False).ids]
    turned = vocabulary["<end_of_turn>"]
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": [2, turned]}


def test_llama_2(tmp_path: Path) -> None:
    """Texts begin with a space, which decoding takes away."""
    vocabulary = {text: at for at, (text, _, _) in enumerate(pieces())}
    ours = rebuilt(of_pieces(tmp_path))
    merges = [tuple(merge) for merge in json.loads(ours.to_str())["model"]["merges"]]
    original = LlamaTokenizer(vocab=vocabulary, merges=merges).backend_tokenizer
    for text in (text for text in TEXTS if "<" not in text and not text.startswith(" ")):
        ids = original.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == ids
        assert ours.decode(ids) == original.decode(ids) == text
    assert ours.encode("hi").ids[0] == 1


def sentence_piece(text: str) -> list[str]:
    """SentencePiece's own rule: of all neighbours merge those that make the token of the highest score."""
    known = {piece: score for piece, score, kind in pieces() if kind == 1}
    parts = list(spaces(text))
    while pairs := [(known[a + b], -at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in known]:
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def test_merges_follow_scores(tmp_path: Path) -> None:
    ours = rebuilt(of_pieces(tmp_path, add_space_prefix=False))
    characters = {piece for piece, _, kind in pieces() if kind == 1}
    texts = [text for text in (*TEXTS, *CORPUS[-40:]) if set(spaces(text)) <= characters and "<" not in text]
    assert len(texts) > 30
    for text in texts:
        assert ours.encode(text, add_special_tokens=False).tokens == sentence_piece(text)


@pytest.mark.parametrize(("name", "drops"), [("Phi-3 Mini 4k", True), ("phi3.5", True), ("Llama 2", False)])
def test_special_tokens_of_phi_3_drop_the_spaces_behind_them(name: str, drops: bool, tmp_path: Path) -> None:
    ours = rebuilt(of_pieces(tmp_path, name=name))
    dropped = ours.encode("<start_of_turn> \n a").ids == ours.encode("<start_of_turn>a").ids
    assert dropped == drops
    assert ours.encode("<unk> a").ids != ours.encode("<unk>a").ids


def test_a_tokenizer_beside_the_file_keeps_the_files_ends_and_template(tmp_path: Path) -> None:
    file = of_pieces(tmp_path, template="{{ messages }}")
    write_tokenizer(read_header(file), tmp_path)
    own = (tmp_path / "tokenizer.json").read_text().replace("<table>", "<other>")
    (tmp_path / "tokenizer.json").write_text(own)
    for name in ("generation_config.json", "chat_template.jinja"):
        (tmp_path / name).unlink()
    write_tokenizer(read_header(file), tmp_path, ["tokenizer.json"])
    assert (tmp_path / "tokenizer.json").read_text() == own
    assert 2 in json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    assert (tmp_path / "chat_template.jinja").read_text() == "{{ messages }}"
