"""The tokenizer that a GGUF brings in its metadata, as tokenizer.json and what belongs beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssd.errors import UsageError

if TYPE_CHECKING:
    from gguf import GGUFReader

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_PREFIX = "tokenizer.ggml."
# What `tokenizer.ggml.pre` calls a way to cut text before merging -> whether digits are cut one by one.
_CUTS = {"default": False, "gpt-2": False, "smollm": True}
_CONTROL, _USER_DEFINED = 3, 4


def write_tokenizer(reader: GGUFReader, directory: Path) -> None:
    """Write the files into `directory`; UsageError for a kind of tokenizer that is not rebuilt here."""
    kind, cut = _field(reader, "model"), _field(reader, "pre") or "default"
    if kind != "gpt2" or not isinstance(cut, str) or cut not in _CUTS:
        raise UsageError(
            f"the tokenizer in {reader.data.filename} ({kind!r}, {cut!r}) is not read: "
            "put the tokenizer.json of the model beside it"
        )
    if _field(reader, "add_eos_token"):
        raise UsageError(
            f"{reader.data.filename}: tokenizer.ggml.add_eos_token: texts that go on from an end are not supported"
        )
    try:
        _tokenizer(reader, digits=_CUTS[cut]).save(str(directory / "tokenizer.json"))
        _write_settings(reader, directory)
    except Exception as error:  # the library raises bare Exception, and the metadata may be of any type
        first, *_ = str(error).splitlines() or [type(error).__name__]
        raise UsageError(f"the tokenizer in {reader.data.filename} is broken: {first}") from error


def _write_settings(reader: GGUFReader, directory: Path) -> None:
    """What stands beside a tokenizer: names of special tokens, what ends a text, the chat template."""
    tokens = _field(reader, "tokens")
    ids = {key: _field(reader, f"{key}_token_id") for key in ("bos", "eos", "eot", "eom")}
    known = {key: at for key, at in ids.items() if at is not None}
    for key, at in known.items():
        if type(at) is not int or not 0 <= at < len(tokens):
            raise ValueError(f"{key}_token_id {at!r} is not one of {len(tokens)} tokens")
    config = {f"{key}_token": tokens[at] for key, at in known.items() if key in ("bos", "eos")}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    ends = {at for key, at in known.items() if key != "bos"}
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": sorted(ends)}))
    if (template := reader.get_field("tokenizer.chat_template")) is not None:
        (directory / "chat_template.jinja").write_text(template.contents())


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(_PREFIX + name)
    return None if field is None else field.contents()


def _tokenizer(reader: GGUFReader, digits: bool) -> Any:
    """Byte-level BPE over the tokens and merges of the metadata."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    tokens, merges = _field(reader, "tokens"), _field(reader, "merges")
    kinds = _field(reader, "token_type") or [1] * len(tokens)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ", 1)) for merge in merges]))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False)])
    if _field(reader, "add_bos_token"):
        first = _field(reader, "bos_token_id")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[tokens[first], "$A"], special_tokens=[(tokens[first], first)]
        )
    return tokenizer
