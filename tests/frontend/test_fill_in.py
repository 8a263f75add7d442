"""Filling in the middle: `suffix` of `/v1/completions`, and the prompts of families of code models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Reference
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from ssd.frontend.fill_in import File, FillIn, fill_in
from ssd.frontend.tokenization import Tokenizer
from tests.frontend.tool_model import AFTER, BEFORE, MARKS, Thinker, saying

COMPLETIONS = "/v1/completions"


def test_a_completion_stands_between_prompt_and_suffix(coder: Thinker) -> None:
    submit = coder.engine.submitted(COMPLETIONS, prompt=BEFORE, suffix=AFTER, stop_token_ids=[7])
    said = f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>"
    assert coder.tokenizer.decode(submit.token_ids) == said
    assert submit.token_ids == coder.engine.submitted(COMPLETIONS, prompt=said).token_ids, (
        "as editors render it themselves"
    )
    marks = {coder.tokenizer.encode(mark)[0] for mark in MARKS}
    assert {7} | marks <= set(submit.params.stop_token_ids)
    for suffix in ("", None):
        assert coder.prompt(COMPLETIONS, prompt=BEFORE, suffix=suffix) == BEFORE


def test_the_mark_that_ends_an_answer_is_not_shown(coder: Thinker) -> None:
    with saying(coder, " a + b<|file_sep|>") as engine:
        status, whole = engine.post(COMPLETIONS, prompt=[BEFORE, "x"], suffix=AFTER, max_tokens=50)
        assert status == 200, whole
        assert [(choice["text"], choice["finish_reason"]) for choice in whole["choices"]] == [(" a + b", "stop")] * 2
        streamed = engine.events(COMPLETIONS, prompt=BEFORE, suffix=AFTER, max_tokens=50)
        assert "".join(event["choices"][0]["text"] for event in streamed) == " a + b"


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"prompt": [1, 2], "suffix": "x"}, "suffix", "invalid_value"),
        ({"prompt": "a", "suffix": "x", "echo": True}, "echo", "invalid_value"),
        ({"prompt": "a ", "suffix": "x " * 600}, "prompt", "context_length_exceeded"),
        ({"prompt": "a", "suffix": 5}, "suffix", "invalid_value"),
        ({"prompt": "a", "suffix": "x", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "invalid_value"),
    ],
)
def test_what_cannot_be_filled_in_is_refused(coder: Thinker, body: dict[str, Any], param: str, code: str) -> None:
    status, answer = coder.engine.post(COMPLETIONS, **body)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code), answer


def test_a_model_without_the_tokens_says_so(thinker: Thinker) -> None:
    status, answer = thinker.engine.post(COMPLETIONS, prompt="a", suffix="x")
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "suffix", "unsupported_parameter")
    assert "fim_prefix" in answer["error"]["message"]


# -- the prompts of other families ----------------------------------------------------------------------------------


def words(*marks: str) -> Reference:
    """A tokenizer of words, with these marks, that begins texts with <s>."""
    texts = ["<unk>", "<s>", "a", "b", "c", *marks]
    tokenizer = Reference(WordLevel({text: number for number, text in enumerate(texts)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<s>", *marks])
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "<s> <fim_prefix> a <fim_suffix> b <fim_middle>"),
        (("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"), "<s> ▁<PRE> a ▁<SUF> b ▁<MID>"),
        (
            ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
            "<s> <｜fim▁begin｜> a <｜fim▁hole｜> b <｜fim▁end｜>",
        ),
        (("[PREFIX]", "[SUFFIX]"), "<s> [SUFFIX] b [PREFIX] a"),
        (("[PREFIX]", "<fim_prefix>"), None),
        ((), None),
    ],
)
def test_each_family_has_its_marks(tmp_path: Path, marks: tuple[str, ...], expected: str | None) -> None:
    reference = words(*marks)
    reference.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    maker = tokenizer.fill_in
    if expected is None:
        assert maker is None and not tokenizer.vocabulary().fill_in_ends
        return
    assert maker is not None
    assert [reference.id_to_token(id) for id in maker.ids("a", "b")] == expected.split()
    assert {reference.token_to_id(mark) for mark in marks} == tokenizer.vocabulary().fill_in_ends
    assert [reference.id_to_token(id) for id in maker.ids("a", "b", [File("x", "c")])][1] == "c", "without its name"


def test_a_prompt_never_has_more_than_fits() -> None:
    def make(most: int, before: int, after: int, files: int) -> list[int]:
        return maker.ids("p" * before, "s" * after, [File("n", "t" * 5)] * files, most)

    names = {mark: number for number, mark in enumerate(MARKS)}
    maker = fill_in(names, lambda text: [9] * len(text), lambda: [8])
    assert isinstance(maker, FillIn)
    for most in range(4, 60):
        for lengths in ((0, 0, 3), (100, 0, 1), (0, 100, 1), (100, 100, 0), (3, 5, 2)):
            assert len(make(most, *lengths)) <= most
    assert len(make(50, 100, 100, 0)) == 50
