"""Text to token ids and back, and chat templates, with the `tokenizers` library alone."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as _Tokenizer

from ssd.errors import RequestError, UsageError
from ssd.frontend.detokenization import Vocabulary
from ssd.ipc.public import MAX_TEXT, ChatMessage
from ssd.models.checkpoint import MAX_TOKENIZER, read_bounded

_MOST_PIECE = 4096
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """The tokenizer and chat template of the checkpoint in `directory`.

    It runs the model's own regular expressions and template, which may take any time and memory; the caller must bound
    them, as `ssd.frontend.text_server` does. Without a tokenizer.json the model serves prompts of token ids, and its
    text is empty. Raises UsageError, naming the file, for a tokenizer that cannot be read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tokenizer = _load_tokenizer(directory / "tokenizer.json")
        config = _load_config(directory / "tokenizer_config.json") if self._tokenizer is not None else {}
        self._special = {
            name: text for name, value in config.items() if name.endswith("_token") and (text := _content(value))
        }
        self._named_template, self._template_file = _template_of(config), directory / "chat_template.jinja"
        self._template: Template | None = None

    @property
    def has_chat(self) -> bool:
        """True if there is a chat template, valid or not."""
        if self._tokenizer is None:
            return False
        return self._named_template is not None or self._template_file.is_file()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of a raw prompt, with or without the special tokens of the model's post-processor."""
        if self._tokenizer is None:
            raise RequestError("invalid_request", "this model has no tokenizer; give token ids")
        # Twice as fast as `encode` for long texts: it keeps no offsets.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Returns the ids of a conversation in the model's chat format, up to the assistant's answer."""
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        """Returns the text of such a conversation, special tokens included.
        Raises RequestError where the template fails or adds more than `MAX_TEXT` characters."""
        template = self.chat_template()
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        most = MAX_TEXT + sum(len(message.content) for message in messages)
        parts, length = [], 0
        try:
            for part in template.generate(
                messages=conversation, add_generation_prompt=True, tools=None, documents=None, **self._special
            ):
                parts.append(part)
                length += len(part)
                if length > most:
                    raise TemplateError(f"it makes more than {most} characters of them")
        except Exception as error:  # a template is the model's own code: whatever it does fails this request only
            cause = str(error) or type(error).__name__
            raise RequestError("invalid_request", f"the chat template refuses these messages: {cause[:256]}") from None
        return "".join(parts)

    def chat_template(self) -> Template:
        """Returns the compiled chat template. Raises RequestError where there is none that can be read."""
        if self._template is not None:
            return self._template
        if not self.has_chat:
            raise RequestError("invalid_request", "this model has no chat template; give a raw prompt")
        try:
            source = self._named_template
            if self._template_file.is_file():
                source = read_bounded(self._template_file).decode()
            self._template = _environment().from_string(source or "")
        except Exception as error:  # compiling evaluates the constants of the model's own code
            cause = str(error) or type(error).__name__
            raise RequestError("invalid_request", f"the chat template cannot be read: {cause[:256]}") from None
        return self._template

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of `token_ids` without special tokens; incomplete characters come out as U+FFFD."""
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def vocabulary(self) -> Vocabulary:
        """Returns the bytes of every token."""
        if self._tokenizer is None:
            return Vocabulary()
        written = {token_id: token for token, token_id in self._tokenizer.get_vocab().items()}
        added = self._tokenizer.get_added_tokens_decoder()
        bytewise = self._decodes("aĠ", "a ")
        fallback = self._decodes("<0x41>", "A")
        pieces: dict[int, bytes] = {}
        first: dict[int, bytes] = {}
        for token_id, token in written.items():
            byte = _BYTE.fullmatch(token) if fallback else None
            if bytewise and _BYTES.keys() >= set(token):
                pieces[token_id] = token.translate(_LATIN).encode("latin-1")
            elif byte is not None:
                pieces[token_id] = bytes.fromhex(byte[1])
            else:
                # Some decoders strip a space from the first token, or put one between two.
                once = self._tokenizer.decode([token_id], skip_special_tokens=False)
                twice = self._tokenizer.decode([token_id, token_id], skip_special_tokens=False)
                pieces[token_id] = twice.removeprefix(once).encode()
                if pieces[token_id] != once.encode():
                    first[token_id] = once.encode()
                if len(twice) > _MOST_PIECE:
                    raise UsageError(
                        f"{self._directory / 'tokenizer.json'}: token {token_id} stands for more than {_MOST_PIECE} "
                        "characters"
                    )
        return Vocabulary(
            pieces=pieces,
            first=first,
            silent=frozenset(token_id for token_id, token in added.items() if token.special),
            longest_token=max(map(len, written.values()), default=1) or 1,
            has_chat=self.has_chat,
        )

    def _decodes(self, written: str, text: str) -> bool:
        """True if the decoder turns the token `written` into `text`."""
        decoder = None if self._tokenizer is None else self._tokenizer.decoder
        return decoder is not None and decoder.decode([written]) == text


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
    """Returns the text of a special token, written as a string or as an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _template_of(config: dict[str, Any]) -> str | None:
    """Returns `chat_template`: one template, or the one named `default` in a list."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [e.get("template") for e in template if isinstance(e, dict) and e.get("name") == "default"]
        template = named[0] if named else None
    return template if isinstance(template, str) else None


def _environment() -> ImmutableSandboxedEnvironment:
    """Returns the settings, filters and functions that transformers gives chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # jinja's own filter escapes HTML
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte of each character of a byte-level vocabulary (GPT-2).
    Printable Latin-1 characters stand for themselves, the other bytes follow in order from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()
_LATIN = {ord(character): byte for character, byte in _BYTES.items()}
