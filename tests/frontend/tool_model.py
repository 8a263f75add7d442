"""A model whose chat template has a place for tools and thoughts, and what it says in the hands of a test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as Reference

from ssd.config.engine import ServerConfig
from ssd.frontend.tokenization import Tokenizer
from tests.frontend.http_engine import HttpEngine, answering, http_engine
from tests.scripted_engine import MODEL

SERVER = ServerConfig(names=("scripted",), port=0)
FUNCTION: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather <now>",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
WEATHER: dict[str, Any] = {"type": "function", "function": FUNCTION}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "São Paulo"}}\n</tool_call>'
TEMPLATE = """\
{%- for tool in tools or [] %}[{{ tool | tojson }}]{% endfor %}
{%- for message in messages %}<{{ message.role }}{% if message.name %} {{ message.name }}{% endif %}>
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.id }} {{ call.function.name }} \
{{ call.function.arguments.city }}</tool_call>{% endfor %}{% endfor %}
{%- if add_generation_prompt %}<assistant>{% if opens %}<think>
{% endif %}{% endif %}"""


class Thinker(NamedTuple):
    """A running engine, and its model's tokenizer."""

    engine: HttpEngine
    tokenizer: Tokenizer

    def prompt(self, path: str, **body: Any) -> str:
        """Return what the model is told by a request."""
        return self.tokenizer.decode(self.engine.submitted(path, **body).token_ids)


def model(directory: Path, template: str, special: tuple[str, ...] = ()) -> Tokenizer:
    """The packaged tokenizer with another template, and more special tokens."""
    directory.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(MODEL / name, directory)
    (directory / "chat_template.jinja").write_text(template)
    if special:
        tokenizer = Reference.from_file(str(directory / "tokenizer.json"))
        tokenizer.add_special_tokens(list(special))
        tokenizer.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


@contextmanager
def thinking(
    directory: Path, template: str, special: tuple[str, ...] = (), server: ServerConfig = SERVER, **config: Any
) -> Iterator[Thinker]:
    """An engine whose model is that of `model`."""
    tokenizer = model(directory, template, special)
    with http_engine(server, target=str(directory), **config) as engine:
        yield Thinker(engine, tokenizer)


@contextmanager
def saying(thinker: Thinker, text: str, each: int = 2) -> Iterator[HttpEngine]:
    engine, tokenizer = thinker
    with answering(engine, tokenizer.encode(text), each):
        yield engine


# A template like that of Qwen 3.5, as far as parsers and histories depend on it.
QWEN = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}
A call looks so:
<tool_call>
<function=NAME>
<parameter=KEY>
VALUE
</parameter>
</function>
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{ message.content }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% if enable_thinking is defined and not enable_thinking %}
</think>

{% endif %}{% endif %}"""


# As in Qwen2.5-Coder's vocabulary, where the marks are no special tokens.
MARKS = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
BEFORE, AFTER = "def add(a, b):\n    return", "\n\nprint(add(1, 2))\n"


def code_model(directory: Path) -> None:
    """Write a model whose tokenizer has the marks to fill in the middle."""
    model(directory, TEMPLATE)
    tokenizer = Reference.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    tokenizer.save(str(directory / "tokenizer.json"))
