"""A model whose tokenizer has the marks to fill in the middle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Reference

from ssd.ipc.messages import Emission, Submit
from tests.frontend.tool_model import TEMPLATE, Thinker, model

# As in Qwen2.5-Coder's vocabulary, where the marks are no special tokens.
MARKS = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
BEFORE, AFTER = "def add(a, b):\n    return", "\n\nprint(add(1, 2))\n"


def code_model(directory: Path) -> None:
    model(directory, TEMPLATE)
    tokenizer = Reference.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    tokenizer.save(str(directory / "tokenizer.json"))


def submitted(coder: Thinker, path: str, **body: Any) -> Submit:
    """What the target gets of a request."""
    connection = coder.engine.connection()
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    submit = coder.engine.engine.target.next_submit()
    coder.engine.engine.target.step(Emission(submit.request, [], finish_reason="stop"))
    assert connection.getresponse().status == 200
    return submit
