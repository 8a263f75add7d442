"""Text to token ids and back, and the chat template; over the `tokenizers` library alone."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as _Tokenizer

from ssd.errors import RequestError, UsageError
from ssd.ipc.messages import ChatMessage
from ssd.models.checkpoint import MAX_TOKENIZER, read_bounded

# What a token adds to a text that it begins, and to one that goes on with it.
_Piece: TypeAlias = tuple[bytes, bytes]
_NOTHING: _Piece = (b"", b"")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """The tokenizer of the checkpoint in `directory`.

    Without a tokenizer.json the model still serves prompts of token ids; its text is empty. Raises UsageError, naming
    the file, for one that cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._tokenizer = _load_tokenizer(directory / "tokenizer.json")
        self._special: dict[str, str] = {}
        self._template: Template | None = None
        vocabulary = self._tokenizer.get_vocab() if self._tokenizer is not None else {}
        self._longest = max(map(len, vocabulary), default=1)
        # The bytes of tokens that have been asked for: at most the vocabulary.
        self._pieces: dict[int, _Piece] = {}
        self._silent: frozenset[int] = frozenset()
        self._bytewise = False
        if self._tokenizer is not None:
            added = self._tokenizer.get_added_tokens_decoder()
            self._silent = frozenset(token_id for token_id, token in added.items() if token.special)
            self._bytewise = self._decodes("aĠ", "a ")
            self._load_chat(directory)

    @property
    def longest_token(self) -> int:
        """Characters of the longest token as the vocabulary writes it; 1 without a tokenizer."""
        return self._longest

    @property
    def has_chat(self) -> bool:
        return self._template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a raw prompt, with the special tokens that the model's own post-processor adds or without."""
        if self._tokenizer is None:
            raise RequestError("invalid_request", "this model has no tokenizer; give token ids")
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Ids of a conversation in the model's chat format, up to where the assistant's answer begins."""
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        """The text of such a conversation, special tokens included."""
        if self._template is None:
            raise RequestError("invalid_request", "this model has no chat template; give a raw prompt")
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._template.render(
                messages=conversation, add_generation_prompt=True, tools=None, documents=None, **self._special
            )
        except Exception as error:  # a template is the model's own code: whatever it does fails this request only
            raise RequestError("invalid_request", f"the chat template refuses these messages: {error}") from None

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without special tokens; incomplete characters come out as U+FFFD."""
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def piece(self, token_id: int) -> str:
        """The text of one token by itself, special ones by their name; bytes that are no character as \\xNN."""
        return self.piece_bytes(token_id).decode("utf-8", "backslashreplace")

    def piece_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for after others; empty for ids without a token."""
        return self._piece(token_id)[1]

    def added_bytes(self, token_id: int) -> _Piece:
        """What one token adds to a text as its first and as a later one: nothing if it is special."""
        return _NOTHING if token_id in self._silent else self._piece(token_id)

    def _piece(self, token_id: int) -> _Piece:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._find_piece(token_id)
        return piece

    def _find_piece(self, token_id: int) -> _Piece:
        written = None if self._tokenizer is None else self._tokenizer.id_to_token(token_id)
        if self._tokenizer is None or written is None:
            return _NOTHING
        if self._bytewise and all(character in _BYTES for character in written):
            whole = bytes(_BYTES[character] for character in written)
            return whole, whole
        fallback = _BYTE.fullmatch(written)
        if fallback and self._decodes("<0x41>", "A"):
            whole = bytes.fromhex(fallback[1])
            return whole, whole
        # Some decoders strip a space from the first token, or put one between two.
        once = self._tokenizer.decode([token_id], skip_special_tokens=False)
        twice = self._tokenizer.decode([token_id, token_id], skip_special_tokens=False)
        return once.encode(), twice.removeprefix(once).encode()

    def _decodes(self, written: str, text: str) -> bool:
        """Whether this is what the decoder makes of a token that is written so."""
        decoder = None if self._tokenizer is None else self._tokenizer.decoder
        return decoder is not None and decoder.decode([written]) == text

    def _load_chat(self, directory: Path) -> None:
        config = _load_config(directory / "tokenizer_config.json")
        self._special = {
            name: text for name, value in config.items() if name.endswith("_token") and (text := _content(value))
        }
        path = directory / "chat_template.jinja"
        try:
            source = read_bounded(path).decode() if path.is_file() else _template_of(config)
            self._template = _environment().from_string(source) if source is not None else None
        except (TemplateError, ValueError, RecursionError) as error:
            raise UsageError(f"cannot read the chat template in {directory}: {error}") from None


def _load_tokenizer(path: Path) -> _Tokenizer | None:
    if not path.is_file():
        return None
    text = read_bounded(path, MAX_TOKENIZER)
    try:
        tokenizer = _Tokenizer.from_buffer(text)
    except Exception as error:  # the library raises nothing more specific
        raise UsageError(f"cannot read {path}: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _load_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(read_bounded(path))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None
    if not isinstance(config, dict):
        raise UsageError(f"cannot read {path}: expected an object")
    return config


def _content(token: object) -> str | None:
    """The text of a special token, written as a string or as an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _template_of(config: dict[str, Any]) -> str | None:
    """`chat_template`: one template, or a list of named ones of which `default` is meant."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [e.get("template") for e in template if isinstance(e, dict) and e.get("name") == "default"]
        template = named[0] if named else None
    return template if isinstance(template, str) else None


def _environment() -> ImmutableSandboxedEnvironment:
    """What chat templates are written for: the settings, filters and functions that transformers gives them."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _to_json(value: object, **options: Any) -> str:
    """JSON as it is; jinja's own filter escapes HTML."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2): printable Latin-1 for itself, the
    others in order from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()
