"""Folders with models whose chat template or tokenizer harms who uses it. They have no weights: the mock needs none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_GROWTH = 1000  # of a text, by each of two rules

# What a template does when a user says the word.
TEMPLATES = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{{ (10 + messages | length) ** (10 ** 9) }}",
    "justified": "{{ said.ljust(2 * 10 ** 9) }}",
    "format": "{{ '%2000000000d' % (messages | length) }}",
    "output": "{% for a in range(50000) %}{{ said * 170 }}{% endfor %}",
    "doubling": "{% set n = namespace(s=said) %}{% for a in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "replaced": "{{ (said * 30000).replace('r', said * 30000) }}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "escape": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['__builtins__'] }}",
    "builtins": "{{ cycler.__init__.__globals__.os.system('touch PWNED') }}",
    "include": "{% include '/etc/passwd' %}",
}

# Templates that harm who reads them: constants that are computed before anything is rendered.
AT_LOAD = {"list": "{{ [1] * 4 * 10 ** 8 }}", "text": "{{ 'a' * 3 * 10 ** 9 }}", "tower": "{{ 9 ** (9 ** 9) }}"}

# Texts that the tokenizer of `hostile_model` cannot take: one on which its regex tries every way to split it, and one
# that its normalizer makes a million times as long.
TEXTS = {"backtracking": "a" * 60 + "b", "growth": "§" * 1000}


def hostile_model(source: Path, folder: Path) -> Path:
    """`source` with all of TEMPLATES in one template, and a tokenizer that breaks on TEXTS."""
    branches = "".join(f"{{% elif said == '{word}' %}}{code}" for word, code in TEMPLATES.items())
    template = (
        f"{{% set said = messages[0].content %}}{{% if false %}}{branches}{{% else %}}{{{{ said }}}}{{% endif %}}"
    )
    _linked(source, folder, "tokenizer.json")
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["normalizer"] = _sequence(
        "normalizers",
        {"type": "Replace", "pattern": {"String": "§"}, "content": "¶" * _GROWTH},
        {"type": "Replace", "pattern": {"String": "¶"}, "content": "g" * _GROWTH},
    )
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer["pre_tokenizer"] = _sequence("pretokenizers", split, tokenizer["pre_tokenizer"])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def hostile_at_load(source: Path, folder: Path, template: str) -> Path:
    """`source` with this chat template."""
    _linked(source, folder, "")
    (folder / "chat_template.jinja").write_text(template)
    return folder


def _linked(source: Path, folder: Path, but: str) -> None:
    """All files of a model without its weights and its template."""
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix not in (".safetensors", ".jinja") and file.name != but:
            (folder / file.name).symlink_to(file.resolve())


def _sequence(of: str, *parts: Any) -> dict[str, Any]:
    return {"type": "Sequence", of: list(parts)}
