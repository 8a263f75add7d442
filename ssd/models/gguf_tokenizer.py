"""The tokenizer that a GGUF brings in its metadata, as tokenizer.json and what belongs beside it.

Two kinds are rebuilt as Hugging Face's tokenizers have them: byte-level BPE (`gpt2`), SentencePiece's BPE (`llama`)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssd.errors import UsageError

if TYPE_CHECKING:
    from gguf import GGUFReader

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_LONGEST_PIECE = 1024
"""Characters of a SentencePiece token: its merges are found by trying every cut of it."""
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>")
"""Texts of special tokens that end an answer, whatever the file calls its end: chat models end turns with one of them
and documents with another."""


@dataclass(frozen=True)
class Cut:
    """How a byte-level BPE cuts a text before it merges.

    `patterns` cut one after the other; without any, GPT-2's own does. `digits`: they are cut one by one, first.
    `composed`: the text is brought to NFC. `whole`: a piece that is a token is not merged. `bos`: texts begin with the
    beginning-of-text token where the file does not say."""

    patterns: tuple[str, ...] = ()
    digits: bool = False
    composed: bool = False
    whole: bool = False
    bos: bool = False


def _words(digits: str) -> str:
    """Return the pattern of GPT-4's first tokenizer, in which a number has so many `digits`."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _cased(suffix: str, digits: str) -> str:
    """Return the pattern of GPT-4o's tokenizer, which cuts before capitals; words may have a `suffix`."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{suffix}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{suffix}|\p{{N}}{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+")
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_GPT_2, _DIGITS = Cut(), Cut(digits=True)
_LLAMA_3 = Cut((_words("{1,3}"),), whole=True, bos=True)
_QWEN_2 = Cut((_words(""),), composed=True)
_GPT_4O = Cut((_cased("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "{1,3}"),))
CUTS = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "jais"), _GPT_2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LLAMA_3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN_2),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Cut((_words("{1,3}"),))),
    "stablelm2": Cut((_words(""),)),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT_4O),
    "tekken": Cut((_cased("", ""),), whole=True, bos=True),
    "deepseek-coder": Cut(_DEEPSEEK_CODER, digits=True),
    "deepseek-v3": Cut(_DEEPSEEK_3),
    "olmo": Cut(composed=True),
}
"""`tokenizer.ggml.pre`, by llama.cpp's names -> what the tokenizer.json of these models does."""


def write_tokenizer(reader: GGUFReader, directory: Path) -> None:
    """Write the files into `directory`; UsageError for a kind of tokenizer that is not rebuilt here."""
    kind, cut = _field(reader, "model"), _field(reader, "pre") or "default"
    known = kind == "llama" or (kind == "gpt2" and isinstance(cut, str) and cut in CUTS)
    if not known:
        raise UsageError(
            f"the tokenizer in {reader.data.filename} ({kind!r}, {cut!r}) is not read: "
            "put the tokenizer.json of the model beside it"
        )
    if _field(reader, "add_eos_token"):
        raise UsageError(
            f"{reader.data.filename}: tokenizer.ggml.add_eos_token: texts that go on from an end are not supported"
        )
    try:
        tokens, kinds = _tokens(reader)
        tokenizer = _sentence_piece(reader, tokens, kinds) if kind == "llama" else _bpe(reader, tokens, CUTS[cut])
        _finish(reader, tokenizer, tokens, kinds, bos=kind == "llama" or CUTS[cut].bos)
        tokenizer.save(str(directory / "tokenizer.json"))
        _write_settings(reader, directory, tokens, kinds)
    except Exception as error:  # the library raises bare Exception, and the metadata may be of any type
        first, *_ = str(error).splitlines() or [type(error).__name__]
        raise UsageError(f"the tokenizer in {reader.data.filename} is broken: {first}") from error


def _write_settings(reader: GGUFReader, directory: Path, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Write what stands beside a tokenizer: names of special tokens, what ends a text, the chat template."""
    known = {key: at for key in ("bos", "eos", "eot", "eom") if (at := _token(reader, key, tokens)) is not None}
    names = {f"{key}_token": tokens[at] for key, at in known.items() if key in ("bos", "eos")}
    ends = {at for key, at in known.items() if key != "bos"}
    marked = (at for at, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED))
    ends |= {at for at in marked if tokens[at] in _ENDS}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": sorted(ends)}))
    if (template := reader.get_field("tokenizer.chat_template")) is not None:
        text = template.contents()
        if not isinstance(text, str):
            raise ValueError(f"tokenizer.chat_template is no text but {text!r}")
        (directory / "chat_template.jinja").write_text(text)


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(_PREFIX + name)
    return None if field is None else field.contents()


def _token(reader: GGUFReader, key: str, tokens: Sequence[str]) -> int | None:
    """Return a special token's id, None if the file names none. Raises ValueError for one that is no token."""
    at = _field(reader, f"{key}_token_id")
    if at is not None and (type(at) is not int or not 0 <= at < len(tokens)):
        raise ValueError(f"{key}_token_id {at!r} is not one of {len(tokens)} tokens")
    return at


def _tokens(reader: GGUFReader) -> tuple[list[str], list[int]]:
    """Return every token's text, and its kind. Raises ValueError if they do not fit each other."""
    tokens: Any = _field(reader, "tokens")
    kinds: Any = _field(reader, "token_type") or [_NORMAL] * len(tokens)
    if not all(isinstance(token, str) for token in tokens):
        raise ValueError("tokenizer.ggml.tokens are no texts")
    if len(set(tokens)) < len(tokens):
        twice, _ = Counter(tokens).most_common(1)[0]
        raise ValueError(f"tokenizer.ggml.tokens has {twice!r} twice")
    if len(kinds) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type has {len(kinds)} numbers for {len(tokens)} tokens")
    return tokens, kinds


def _bpe(reader: GGUFReader, tokens: Sequence[str], cut: Cut) -> Any:
    """Return a byte-level BPE over the tokens and merges of the metadata."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges = [tuple(merge.split(" ", 1)) for merge in _field(reader, "merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=cut.whole))
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in cut.patterns]
    if cut.digits:
        steps.insert(len(steps) if cut.patterns else 0, pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not cut.patterns))
    tokenizer.normalizer = normalizers.NFC() if cut.composed else None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(reader: GGUFReader, tokens: Sequence[str], kinds: Sequence[int]) -> Any:
    """Return a BPE over characters, and bytes where a character is no token. Spaces are U+2581."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = _token(reader, "unknown", tokens)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = _merges(tokens, kinds, _field(reader, "scores"))
    named = None if unknown is None else tokens[unknown]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=named, fuse_unk=True, byte_fallback=True))
    spaces, back = normalizers.Replace(" ", "▁"), [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if _field(reader, "add_space_prefix") in (None, True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        back.append(decoders.Strip(content=" ", left=1))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(back)
    return tokenizer


def _merges(tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float] | None) -> list[tuple[str, str]]:
    """Return all pairs of tokens that make a token, the one of the highest score first.

    SentencePiece merges whatever makes the token of the highest score. This list says the same to a BPE."""
    if scores is None or len(scores) != len(tokens):
        raise ValueError(f"tokenizer.ggml.scores has {len(scores or ())} numbers for {len(tokens)} tokens")
    ids = {token: at for at, token in enumerate(tokens) if kinds[at] in (_NORMAL, _USER_DEFINED)}
    if longest := next((token for token in ids if len(token) > _LONGEST_PIECE), None):
        raise ValueError(f"token {longest[:32]!r}... has {len(longest)} characters, more than {_LONGEST_PIECE}")
    found: list[tuple[str, str]] = []
    for token in sorted(ids, key=lambda token: -scores[ids[token]]):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        whole = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
        found += sorted(whole, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return found


def _finish(reader: GGUFReader, tokenizer: Any, tokens: Sequence[str], kinds: Sequence[int], bos: bool) -> None:
    """Add the special tokens, and the beginning of a text if the file wants it, or says nothing and `bos` is True."""
    from tokenizers import AddedToken, processors

    special = (_CONTROL, _UNKNOWN)
    added = [
        AddedToken(token, special=kind in special, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (*special, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    wanted = _field(reader, "add_bos_token")
    first = _token(reader, "bos", tokens)
    if first is not None and (bos if wanted is None else wanted):
        named = [(tokens[first], first)]
        tokenizer.post_processor = processors.TemplateProcessing(single=[tokens[first], "$A"], special_tokens=named)
