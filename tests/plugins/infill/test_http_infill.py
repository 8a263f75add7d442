"""llama.cpp's `/infill` over HTTP, and what editors send."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.frontend.tool_model import AFTER, BEFORE, Thinker, saying

INFILL = "/infill"


def test_the_mark_that_ends_an_answer_is_not_shown(coder: Thinker) -> None:
    with saying(coder, " a + b<|file_sep|>") as engine:
        _, filled = engine.post(INFILL, input_prefix=BEFORE, input_suffix=AFTER)
        assert (filled["content"], filled["stop_type"]) == (" a + b", "eos")


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input_prefix": "a", "n": 2}, "n", "unsupported_parameter"),
        ({"input_extra": [{"filename": "a"}]}, "input_extra[0].text", "missing_parameter"),
    ],
)
def test_a_wrong_field_is_refused(coder: Thinker, body: dict[str, Any], param: str, code: str) -> None:
    status, answer = coder.engine.post(INFILL, **body)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code), answer


def test_a_model_without_the_tokens_says_so(thinker: Thinker) -> None:
    status, answer = thinker.engine.post(INFILL, input_prefix="a")
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "input_suffix", "unsupported_parameter")
    assert "fim_prefix" in answer["error"]["message"]


LLAMA_VIM: dict[str, Any] = json.loads(Path(__file__).with_name("llama_vim.json").read_text())
"""A request in the shape of llama.vim's."""


def test_an_editor_gets_the_fields_that_it_reads(coder: Thinker) -> None:
    with saying(coder, " a + b<|endoftext|>") as engine:
        status, answer = engine.post(INFILL, **LLAMA_VIM)
    assert status == 200 and [*answer] == LLAMA_VIM["response_fields"]
    assert answer["content"] == " a + b" and answer["truncated"] is False
    assert answer["timings/predicted_n"] == len(coder.tokenizer.encode(" a + b<|endoftext|>"))


def test_other_files_come_first_and_the_typed_line_follows_the_prefix(coder: Thinker) -> None:
    submit = coder.engine.submitted(INFILL, **LLAMA_VIM)
    files = "<|file_sep|>sub.py\ndef sub(a, b): ...\n<|file_sep|>mul.py\ndef mul(a, b): ...\n<|file_sep|>file\n"
    own = f"<|fim_prefix|>import sys\n\n{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>"
    assert coder.tokenizer.decode(submit.token_ids) == f"<|repo_name|>repository\n{files}{own}"
    assert (submit.params.max_tokens, submit.params.top_k) == (128, 40)


def test_a_long_context_is_cut_to_what_fits(coder: Thinker) -> None:
    """The files go first, then the ends that are far from the cursor."""
    body = {
        **LLAMA_VIM,
        "input_prefix": "far " + "near " * 900,
        "input_suffix": "close " * 900 + "off",
        "prompt": "x =",
    }
    submit = coder.engine.submitted(INFILL, **body)
    assert len(submit.token_ids) == 511 - 128
    said = coder.tokenizer.decode(submit.token_ids)
    before, after = said.removeprefix("<|fim_prefix|>").removesuffix("<|fim_middle|>").split("<|fim_suffix|>")
    assert "far" not in before and before.endswith("near x =") and "off" not in after and after.startswith("close ")
    assert "sub.py" not in said
    short = coder.prompt(INFILL, **{**body, "input_prefix": "far ", "input_suffix": "close " * 380})
    assert "<|fim_prefix|>far x =<|fim_suffix|>" in short
    assert short.count("close") > 300, "the suffix takes what the prefix leaves"


def test_the_last_files_have_the_room_that_is_left(coder: Thinker) -> None:
    files = [{"filename": "old.py", "text": "old " * 300}, {"filename": "new.py", "text": "new " * 100}]
    said = coder.prompt(INFILL, **{**LLAMA_VIM, "input_extra": files})
    assert "new.py" in said and "old.py" not in said


def test_a_prompt_is_cached_without_an_answer(coder: Thinker) -> None:
    """llama.vim sends the context before somebody types."""
    body = {"input_prefix": BEFORE, "n_predict": 0, "temperature": 0.0, "samplers": [], "t_max_predict_ms": 1}
    with saying(coder, " a + b") as engine:
        for fields, expected in (({"response_fields": [""]}, {}), ({"response_fields": ["content"]}, {"content": ""})):
            assert engine.post(INFILL, **body, **fields) == (200, expected)
        _, whole = engine.post(INFILL, **body)
        assert (whole["content"], whole["tokens_predicted"]) == ("", 0)
    assert coder.engine.submitted(INFILL, **body).params.max_tokens == 1


def test_an_infilling_is_streamed_as_llama_cpp_does(coder: Thinker) -> None:
    with saying(coder, " a + b and c") as engine:
        status, headers, content = engine.ask("POST", INFILL, {"input_prefix": BEFORE, "n_predict": 4, "stream": True})
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    *parts, rest = content.decode().split("\n\n")
    assert rest == ""
    events = [json.loads(part.removeprefix("data: ")) for part in parts]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True] and len(events) > 2
    assert "".join(event["content"] for event in events) == " a + b and"
    last = events[-1]
    assert (last["stop_type"], last["tokens_predicted"], last["model"]) == ("limit", 4, "scripted")
    assert last["timings"]["predicted_n"] == 4 and last["tokens_evaluated"] > 0
