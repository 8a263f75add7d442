"""Encoding, decoding and chat templates against transformers' rules, on the packaged tokenizer and small ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Reference
from tokenizers.processors import TemplateProcessing

from ssd.errors import RequestError, UsageError
from ssd.frontend.tokenization import Tokenizer
from ssd.ipc.public import ChatMessage
from tests.scripted_engine import MODEL

HELLO = [ChatMessage("user", "Hello there")]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(MODEL)


def model(tmp_path: Path, **config: Any) -> Path:
    """A directory with the packaged tokenizer, without its template, and a tokenizer_config.json of `config`."""
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("text", ["Why is the sky blue?", "naïve café", "日本語 🙂👩‍👩‍👧", "  spaces\n\ttabs "])
def test_raw_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_read_in_prompts_and_left_out_of_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>a<|im_end|>")
    assert ids[0] == 1
    assert ids[-1] == 2
    assert tokenizer.decode(ids) == "a"


def test_special_tokens_of_the_post_processor_are_added_to_raw_prompts_only(tmp_path: Path) -> None:
    directory = model(tmp_path, chat_template="<|im_start|>{{ messages[0].content }}")
    reference = Reference.from_file(str(directory / "tokenizer.json"))
    reference.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    reference.save(str(directory / "tokenizer.json"))
    tokenizer = Tokenizer(directory)
    assert tokenizer.encode("hi")[0] == 1
    assert tokenizer.encode_chat([ChatMessage("user", "hi")]) == tokenizer.encode("hi")


def test_long_prompts_are_never_truncated(tmp_path: Path) -> None:
    directory = model(tmp_path)
    reference = Reference.from_file(str(directory / "tokenizer.json"))
    reference.enable_truncation(4)
    reference.enable_padding(length=8)
    reference.save(str(directory / "tokenizer.json"))
    tokenizer = Tokenizer(directory)
    assert len(tokenizer.encode("one two three four five six")) > 4
    assert len(tokenizer.encode("one")) == 1


def test_chat_is_what_the_template_of_the_model_says(tokenizer: Tokenizer) -> None:
    expected = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.has_chat
    assert tokenizer.encode_chat(HELLO) == tokenizer.encode(expected)


def test_template_in_the_config_gets_the_special_tokens_and_the_documented_settings(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}\n{%- for m in messages %}\n    {% if m.role == 'system' %}{% continue %}{% endif %}\n"
        "{{ m | tojson }}{% endfor %}{% if tools is not none %}tools{% endif %}"
        "{% if add_generation_prompt %}{{ eos_token }}{% endif %}"
    )
    named = [{"name": "other", "template": "no"}, {"name": "default", "template": template}]
    tokenizer = Tokenizer(
        model(tmp_path, bos_token={"content": "<|im_start|>"}, eos_token="<|im_end|>", chat_template=named)
    )
    ids = tokenizer.encode_chat([ChatMessage("system", "x"), ChatMessage("user", "<é>")])
    assert ids == tokenizer.encode('<|im_start|>{"role": "user", "content": "<é>"}<|im_end|>')


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('roles must alternate') }}", "{{ messages[0].content.__class__.mro() }}", "{{ 1 + 'a' }}"],
)
def test_a_template_that_objects_fails_the_request_alone(tmp_path: Path, template: str) -> None:
    with pytest.raises(RequestError, match="chat template") as caught:
        Tokenizer(model(tmp_path, chat_template=template)).encode_chat(HELLO)
    assert caught.value.code == "invalid_request"


def test_without_a_template_there_is_no_chat(tmp_path: Path) -> None:
    tokenizer = Tokenizer(model(tmp_path))
    assert not tokenizer.has_chat
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.encode_chat(HELLO)


def test_without_a_tokenizer_only_token_ids_work(tmp_path: Path) -> None:
    tokenizer = Tokenizer(tmp_path)
    assert not tokenizer.has_chat
    assert tokenizer.decode([1, 2, 3]) == ""
    with pytest.raises(RequestError, match="no tokenizer"):
        tokenizer.encode("text")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{"),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b'{"a":' * 100_000),
    ],
    ids=lambda value: value[:12],
)
def test_unreadable_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    directory = model(tmp_path)
    (directory / name).write_bytes(content)
    with pytest.raises(UsageError, match=name):
        Tokenizer(directory)


@pytest.mark.parametrize(
    "content",
    [b"{% if %}", b"\xff\xfe", b"{% if 1 %}" * 500 + b"{% endif %}" * 500],
    ids=["syntax", "utf-8", "depth"],
)
def test_a_template_that_cannot_be_read_costs_chat_alone(tmp_path: Path, content: bytes) -> None:
    directory = model(tmp_path)
    (directory / "chat_template.jinja").write_bytes(content)
    tokenizer = Tokenizer(directory)
    with pytest.raises(RequestError, match="the chat template cannot be read"):
        tokenizer.encode_chat(HELLO)
    assert tokenizer.encode("hi")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_files_that_would_fill_the_memory_are_not_read(tmp_path: Path, name: str) -> None:
    directory = model(tmp_path)
    with (directory / name).open("wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    with pytest.raises(UsageError, match=f"{name} is larger than"):
        Tokenizer(directory)


def test_pieces_are_the_bytes_of_a_text(tokenizer: Tokenizer, sentencepiece: Tokenizer) -> None:
    text = "a é 🦥  b"
    for kind, before in ((tokenizer, ""), (sentencepiece, " ")):
        vocabulary = kind.vocabulary()
        assert b"".join(vocabulary.piece_bytes(token) for token in kind.encode(text)).decode() == before + text
    assert vocabulary.piece_bytes(sentencepiece.encode("🦥")[1]) == "🦥".encode()[:1]
    assert vocabulary.piece(sentencepiece.encode("🦥")[1]) == "\\xf0"


def test_special_tokens_have_a_piece_and_add_nothing(tokenizer: Tokenizer, sentencepiece: Tokenizer) -> None:
    for kind, token, name in ((tokenizer, 1, "<|im_start|>"), (sentencepiece, 264, "<s>")):
        vocabulary = kind.vocabulary()
        assert vocabulary.piece(token) == name
        assert vocabulary.added_bytes(token) == (b"", b"")


def test_ids_without_a_token_have_no_piece(tokenizer: Tokenizer) -> None:
    vocabulary = tokenizer.vocabulary()
    assert vocabulary.piece_bytes(49152) == b""
    assert vocabulary.added_bytes(49152) == (b"", b"")
