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
from ssd.ipc.public import CalledTool, ChatMessage, ChatOptions
from tests.first_messages import OPEN_WEBUI
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


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer_config.json", b"[]"), ("tokenizer_config.json", b"{"), ("tokenizer_config.json", b'{"a":' * 100_000)],
    ids=lambda value: value[:12],
)
def test_special_tokens_that_cannot_be_read_cost_chat_alone(tmp_path: Path, name: str, content: bytes) -> None:
    directory = model(tmp_path)
    (directory / "chat_template.jinja").write_text("{{ bos_token }}")
    (directory / name).write_bytes(content)
    tokenizer = Tokenizer(directory)
    with pytest.raises(RequestError, match=name):
        tokenizer.encode_chat(HELLO)
    assert tokenizer.encode("hi")


def test_an_unreadable_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"{")
    with pytest.raises(UsageError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    "content", [b"{% if %}", b"\xff\xfe", b"{% if 1 %}" * 500 + b"{% endif %}" * 500], ids=["syntax", "utf-8", "depth"]
)
def test_a_template_that_cannot_be_read_costs_chat_alone(tmp_path: Path, content: bytes) -> None:
    directory = model(tmp_path)
    (directory / "chat_template.jinja").write_bytes(content)
    tokenizer = Tokenizer(directory)
    with pytest.raises(RequestError, match="the chat template cannot be read"):
        tokenizer.encode_chat(HELLO)
    assert tokenizer.encode("hi")


# -- options of a chat ----------------------------------------------------------------------------------------------

WITH_TOOLS = """{{ tools | tojson if tools else 'no tools' }}{% for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ call.function.name }} {{ call.function.arguments | tojson }}{{ call.id }}
{%- endfor %}{{ m.tool_call_id }}{{ m.name }}{{ m.reasoning_content }}{% endfor %}"""


@pytest.mark.parametrize("arguments", [{"city": "São Paulo", "days": [1, None]}, {}])
def test_tools_and_calls_reach_the_template_as_in_transformers(tmp_path: Path, arguments: dict[str, Any]) -> None:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(tokenizer_file=str(MODEL / "tokenizer.json"), chat_template=WITH_TOOLS)
    tools = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"type": "object"}}}]
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "Hm"},
        {"role": "tool", "content": "4", "tool_call_id": "c1", "name": "f"},
    ]
    called = CalledTool("c1", "f", json.dumps(arguments))
    said = [
        ChatMessage("user", "Hi"),
        ChatMessage("assistant", "", [called], reasoning_content="Hm"),
        ChatMessage("tool", "4", tool_call_id="c1", name="f"),
    ]
    tokenizer = Tokenizer(model(tmp_path, chat_template=WITH_TOOLS))
    for given in (tools, None):
        expected = reference.apply_chat_template(turns, tools=given, tokenize=False)
        assert tokenizer.render_chat(said, ChatOptions(tools=json.dumps(given or []))) == expected


def test_nine_tools_in_plain_text_leave_room_for_a_conversation(tokenizer: Tokenizer) -> None:
    """Half of 2048 tokens, for which a cache on a CPU has pages by default."""
    options = ChatOptions(tools=json.dumps(OPEN_WEBUI["tools"]))
    assert len(tokenizer.encode_chat([ChatMessage("user", "Say hello.")], options, plain_tools=True)) <= 1024
    with pytest.raises(RequestError, match="tools: expected a JSON array"):
        tokenizer.encode_chat(HELLO, ChatOptions(tools="{}"), plain_tools=True)


def test_arguments_that_are_no_json_stay_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(model(tmp_path, chat_template="{{ messages[0].tool_calls[0].function.arguments }}"))
    for text in ("{a", "[" * 10_000):
        assert tokenizer.render_chat([ChatMessage("assistant", "", [CalledTool("c", "f", text)])]) == text
    with pytest.raises(RequestError, match="tools: expected a JSON array"):
        tokenizer.render_chat(HELLO, ChatOptions(tools="{}"))


SAID = [ChatMessage("user", "Hi"), ChatMessage("assistant", " So it is \n")]
THINKS = "{% if enable_thinking is defined and not enable_thinking %}<quick>{% endif %}{{ more.a[1] }}"


@pytest.mark.parametrize("said", [HELLO, SAID, [*SAID, ChatMessage("user", "Go on")]], ids=len)
def test_the_final_message_is_continued_as_transformers_does(tokenizer: Tokenizer, said: list[ChatMessage]) -> None:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(MODEL / "tokenizer.json"),
        chat_template=(MODEL / "chat_template.jinja").read_text(),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
    )
    messages = [{"role": one.role, "content": one.content} for one in said]
    for options in ({"continue_final_message": True}, {}):
        expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=False, **options)
        assert tokenizer.render_chat(said, ChatOptions(False, **options)) == expected


def test_one_prompt_does_not_both_continue_and_begin(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="set add_generation_prompt to false"):
        tokenizer.render_chat(SAID, ChatOptions(continue_final_message=True))
    silent = Tokenizer(model(tmp_path, chat_template="{{ messages[0].content }}"))
    with pytest.raises(RequestError, match="leaves out the final message"):
        silent.render_chat(SAID, ChatOptions(False, True))


def test_clients_set_variables_of_the_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer(model(tmp_path, chat_template=THINKS))
    given = json.dumps({"enable_thinking": False, "more": {"a": [1, "é"]}})
    assert tokenizer.render_chat(HELLO, ChatOptions(template_kwargs=given)) == "<quick>é"
    for wrong in ("[]", "{", "[" * 10_000, "1" * 10_000, '{"messages": []}', '{"chat_template": ""}'):
        with pytest.raises(RequestError, match="chat_template_kwargs"):
            tokenizer.render_chat(HELLO, ChatOptions(template_kwargs=wrong))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_files_that_would_fill_the_memory_are_not_read(tmp_path: Path, name: str) -> None:
    directory = model(tmp_path)
    with (directory / name).open("wb") as file:
        file.truncate(1 << 40)  # takes no room on the disk
    with pytest.raises((UsageError, RequestError), match=f"{name} is larger than"):
        Tokenizer(directory).encode_chat(HELLO)


MARKED = """{%- for m in messages -%}
    <|im_start|>{{ m.role }}
    {% if m.role == 'assistant' %}
        {% generation %}
            {% set text = m.content %}
            {{- text }}<|im_end|>
        {% endgeneration %}
    {% else %}
        {{- m.content }}<|im_end|>
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant{% endif %}
"""


def test_answers_that_a_template_marks_for_training_are_text_as_any(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    said = [ChatMessage("user", "a"), ChatMessage("assistant", "b"), ChatMessage("user", "c")]
    reference = PreTrainedTokenizerFast(tokenizer_file=str(MODEL / "tokenizer.json"), chat_template=MARKED)
    messages = [{"role": one.role, "content": one.content} for one in said]
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert Tokenizer(model(tmp_path, chat_template=MARKED)).render_chat(said) == expected


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
