"""Writes the tokenizer in a GGUF's metadata, byte-level BPE or SentencePiece, as tokenizer.json."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ssd.errors import UsageError
from ssd.models.gguf.header import Header
from ssd.models.gguf.pretokenizers import CUTS

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_PREFIX = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPM_IDS = {"unknown": 0, "bos": 1, "eos": 2}  # llama.cpp's defaults for SentencePiece
# Tokens that always end a turn, even if the metadata names others or gives them another type.
_END_TEXTS = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>"}
_END_TEXTS |= {"<|end_of_text|>", "<EOT>", "_<EOT>", "<end_of_utterance>"}
# Special tokens of Phi-3 that keep the whitespace behind them; all its others drop it.
_KEEP_SPACE = {"<unk>", "<s>", "<|endoftext|>"}
_SPACE, _LONGEST = "▁", 1024


def write_tokenizer(header: Header, directory: Path, kept: Collection[str] = ()) -> None:
    """Write `FILES` into `directory`, except for those in `kept`, which are there already.

    Raises UsageError for a tokenizer that is neither rebuilt here nor kept."""
    given = "tokenizer.json" in kept
    if given and _field(header, "tokens") is None:
        return
    kind, cut = _field(header, "model"), _field(header, "pre") or "default"
    if not given and not (kind == "llama" or (kind == "gpt2" and isinstance(cut, str) and cut in CUTS)):
        raise UsageError(
            f"the tokenizer in {header.file} ({kind!r}, {cut!r}) is not read: "
            "put the tokenizer.json of the model beside it"
        )
    if not given and _field(header, "add_eos_token"):
        raise UsageError(f"{header.file}: tokenizer.ggml.add_eos_token: texts that go on from an end are not supported")
    try:
        tokens, types = _tokens(header)
        ids = _special_ids(header, len(tokens), _SPM_IDS if kind == "llama" else {})
        if not given:
            if kind == "llama":
                tokenizer, bos = _sentencepiece(header, tokens, types, ids), True
            else:
                tokenizer, bos = _byte_level(header, tokens, cut), CUTS[cut].bos
            _add_special(header, tokenizer, tokens, types, ids.get("bos"), bos)
            tokenizer.save(str(directory / "tokenizer.json"))
        _write_settings(header, directory, tokens, types, ids, kept)
    except Exception as error:  # the library raises bare Exception, and the metadata may be of any type
        first, *_ = str(error).splitlines() or [type(error).__name__]
        raise UsageError(f"the tokenizer in {header.file} is broken: {first}") from error


def _field(header: Header, name: str) -> Any:
    return header.fields.get(_PREFIX + name)


def _list(header: Header, name: str, kind: type, length: int | None = None) -> list[Any]:
    values = _field(header, name)
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        raise ValueError(f"{_PREFIX}{name} is no list of {kind.__name__}")
    if length is not None and len(values) != length:
        raise ValueError(f"{_PREFIX}{name} has {len(values)} entries for {length} tokens")
    return values


def _tokens(header: Header) -> tuple[list[str], list[int]]:
    """Return the text and the type of every token; raise ValueError if two have the same text."""
    tokens = _list(header, "tokens", str)
    types = [1] * len(tokens)
    if _field(header, "token_type") is not None:
        types = _list(header, "token_type", int, len(tokens))
    if _field(header, "model") == "llama":  # llama.cpp's converter writes runs of spaces as spaces
        tokens = [
            text.replace(" ", _SPACE) if of == _USER_DEFINED else text for text, of in zip(tokens, types, strict=True)
        ]
    types = [_CONTROL if text in _END_TEXTS else of for text, of in zip(tokens, types, strict=True)]
    seen: set[str] = set()
    for token in tokens:
        if token in seen:
            raise ValueError(f"{_PREFIX}tokens has {token!r} twice")
        seen.add(token)
    return tokens, types


def _special_ids(header: Header, size: int, defaults: dict[str, int]) -> dict[str, int]:
    ids = {key: at for key, at in defaults.items() if at < size}
    for key in ("bos", "eos", "eot", "eom", "unknown"):
        if (at := _field(header, f"{key}_token_id")) is None:
            continue
        if type(at) is not int or not 0 <= at < size:
            raise ValueError(f"{_PREFIX}{key}_token_id {at!r} is not one of {size} tokens")
        ids[key] = at
    return ids


def _byte_level(header: Header, tokens: Sequence[str], cut: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = []
    for merge in _list(header, "merges", str):
        left, _, right = merge.partition(" ")
        if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            raise ValueError(f"{_PREFIX}merges: {merge!r} is not of two tokens that make a third")
        merges.append((left, right))
    way = CUTS[cut]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=way.ignore_merges))
    if way.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(way.steps())
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(header: Header, tokens: Sequence[str], types: Sequence[int], ids: dict[str, int]) -> Any:
    """Return SentencePiece BPE: spaces are "▁", characters without a token become tokens of bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _list(header, "scores", float, len(tokens))
    model = models.BPE(
        {token: index for index, token in enumerate(tokens)},
        _merges_of(tokens, types, scores),
        unk_token=tokens[ids["unknown"]],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = _field(header, "add_space_prefix")
    prefix = True if prefix is None else bool(prefix)
    replace = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix else replace
    decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*decoding, decoders.Strip(" ", 1, 0)] if prefix else decoding)
    return tokenizer


def _merges_of(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the pairs of tokens that make a third, in SentencePiece's order: the best score first.

    If scores are equal, the longer left part comes first. User-defined tokens are matched before all others, so their
    merges come first."""
    ids = {token: index for index, token in enumerate(tokens) if types[index] != _CONTROL}
    if longest := next((token for token in ids if len(token) > _LONGEST), None):  # every cut of it is tried
        raise ValueError(f"{_PREFIX}tokens: {longest[:32]!r}... has {len(longest)} characters, more than {_LONGEST}")
    found = []
    for token, index in ids.items():
        score = math.inf if types[index] == _USER_DEFINED else scores[index]
        pairs = [(token[:at], token[at:]) for at in range(1, len(token)) if token[:at] in ids and token[at:] in ids]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(score, len(left), len(right), left, right) for left, right in pairs]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _add_special(
    header: Header,
    tokenizer: Any,
    tokens: Sequence[str],
    types: Sequence[int],
    bos: int | None,
    default: bool,
) -> None:
    """Add the tokens that are matched before a text is cut, and BOS by the metadata, else by `default`."""
    from tokenizers import AddedToken, processors

    strips = "phi3" in str(header.fields.get("general.name")).lower().replace("-", "")
    tokenizer.add_tokens(
        [
            AddedToken(
                token,
                special=kind != _USER_DEFINED,
                normalized=False,
                rstrip=strips and kind != _USER_DEFINED and token not in _KEEP_SPACE,
            )
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )
    asked = _field(header, "add_bos_token")
    if asked and bos is None:
        raise ValueError(f"{_PREFIX}add_bos_token is set without {_PREFIX}bos_token_id")
    if bos is not None and (default if asked is None else asked):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[tokens[bos], "$A"], special_tokens=[(tokens[bos], bos)]
        )


def _write_settings(
    header: Header,
    directory: Path,
    tokens: Sequence[str],
    types: Sequence[int],
    ids: dict[str, int],
    kept: Collection[str],
) -> None:
    settings, generation = directory / "tokenizer_config.json", directory / "generation_config.json"
    config = {f"{key}_token": tokens[ids[key]] for key in ("bos", "eos") if key in ids}
    if settings.name not in kept:
        settings.write_text(json.dumps(config))
    ends = {ids[key] for key in ("eos", "eot", "eom") if key in ids}
    ends |= {index for index, token in enumerate(tokens) if token in _END_TEXTS}
    if generation.name not in kept:
        generation.write_text(json.dumps({"eos_token_id": sorted(ends)}))
    has_template = "chat_template.jinja" in kept or "chat_template" in json.loads(settings.read_text())
    if not has_template and (template := header.fields.get("tokenizer.chat_template")) is not None:
        if not isinstance(template, str):
            raise ValueError("tokenizer.chat_template is no text")
        (directory / "chat_template.jinja").write_text(template)
