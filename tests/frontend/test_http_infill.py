"""Filling in the middle over HTTP: `suffix` of `/v1/completions`, llama.cpp's `/infill`, and what editors send."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Reference
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from ssd.config.engine import ServerConfig
from ssd.frontend.fill_in import File, FillIn, fill_in
from ssd.frontend.tokenization import Tokenizer
from ssd.ipc.messages import Emission, Submit
from tests.frontend.http_engine import http_engine
from tests.frontend.tool_model import TEMPLATE, Thinker, model, saying

COMPLETIONS, INFILL = "/v1/completions", "/infill"
# As in Qwen2.5-Coder's vocabulary, where the marks are no special tokens.
MARKS = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
BEFORE, AFTER = "def add(a, b):\n    return", "\n\nprint(add(1, 2))\n"


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thinker]:
    """A model whose tokenizer has Qwen's marks."""
    directory = tmp_path_factory.mktemp("coder")
    model(directory, TEMPLATE)
    tokenizer = Reference.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    tokenizer.save(str(directory / "tokenizer.json"))
    server = ServerConfig(names=("scripted",), port=0)
    with http_engine(server, target=str(directory), vocab_size=49152 + len(MARKS), max_model_len=512) as engine:
        yield Thinker(engine, Tokenizer(directory))


def submitted(coder: Thinker, path: str, **body: Any) -> Submit:
    """What the target gets of a request."""
    connection = coder.engine.connection()
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    submit = coder.engine.engine.target.next_submit()
    coder.engine.engine.target.step(Emission(submit.request, [], finish_reason="stop"))
    assert connection.getresponse().status == 200
    return submit


def prompt(coder: Thinker, path: str, **body: Any) -> str:
    return coder.tokenizer.decode(submitted(coder, path, **body).token_ids)


def test_a_completion_stands_between_prompt_and_suffix(coder: Thinker) -> None:
    submit = submitted(coder, COMPLETIONS, prompt=BEFORE, suffix=AFTER, stop_token_ids=[7])
    said = f"<|fim_prefix|>{BEFORE}<|fim_suffix|>{AFTER}<|fim_middle|>"
    assert coder.tokenizer.decode(submit.token_ids) == said
    assert submit.token_ids == submitted(coder, COMPLETIONS, prompt=said).token_ids, "as editors render it themselves"
    marks = {coder.tokenizer.encode(mark)[0] for mark in MARKS}
    assert {7} | marks <= set(submit.params.stop_token_ids)
    for suffix in ("", None):
        assert prompt(coder, COMPLETIONS, prompt=BEFORE, suffix=suffix) == BEFORE


def test_the_mark_that_ends_an_answer_is_not_shown(coder: Thinker) -> None:
    with saying(coder, " a + b<|file_sep|>") as engine:
        status, whole = engine.post(COMPLETIONS, prompt=[BEFORE, "x"], suffix=AFTER, max_tokens=50)
        assert status == 200, whole
        assert [(choice["text"], choice["finish_reason"]) for choice in whole["choices"]] == [(" a + b", "stop")] * 2
        streamed = engine.events(COMPLETIONS, prompt=BEFORE, suffix=AFTER, max_tokens=50)
        assert "".join(event["choices"][0]["text"] for event in streamed) == " a + b"
        _, filled = engine.post(INFILL, input_prefix=BEFORE, input_suffix=AFTER)
        assert (filled["content"], filled["stop_type"]) == (" a + b", "eos")


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (COMPLETIONS, {"prompt": [1, 2], "suffix": "x"}, "suffix", "invalid_value"),
        (COMPLETIONS, {"prompt": "a", "suffix": "x", "echo": True}, "echo", "invalid_value"),
        (COMPLETIONS, {"prompt": "a ", "suffix": "x " * 600}, "prompt", "context_length_exceeded"),
        (COMPLETIONS, {"prompt": "a", "suffix": 5}, "suffix", "invalid_value"),
        (
            COMPLETIONS,
            {"prompt": "a", "suffix": "x", "truncate_prompt_tokens": 5},
            "truncate_prompt_tokens",
            "invalid_value",
        ),
        (INFILL, {"input_prefix": "a", "n": 2}, "n", "unsupported_parameter"),
        (INFILL, {"input_extra": [{"filename": "a"}]}, "input_extra[0].text", "missing_parameter"),
    ],
)
def test_what_cannot_be_filled_in_is_refused(
    coder: Thinker, path: str, body: dict[str, Any], param: str, code: str
) -> None:
    status, answer = coder.engine.post(path, **body)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code), answer


def test_a_model_without_the_tokens_says_so(thinker: Thinker) -> None:
    for path, body, param in (
        (COMPLETIONS, {"prompt": "a", "suffix": "x"}, "suffix"),
        (INFILL, {"input_prefix": "a"}, "input_suffix"),
    ):
        status, answer = thinker.engine.post(path, **body)
        assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, "unsupported_parameter")
        assert "fim_prefix" in answer["error"]["message"]


# -- /infill ----------------------------------------------------------------------------------------------------------

LLAMA_VIM: dict[str, Any] = {
    "id_slot": 0,
    "input_prefix": "import sys\n\n",
    "input_suffix": AFTER,
    "input_extra": [
        {"text": "def sub(a, b): ...", "time": [1, 2], "str": "def sub", "filename": "sub.py"},
        {"text": "def mul(a, b): ...", "time": [1, 2], "str": "def mul", "filename": "mul.py"},
    ],
    "prompt": BEFORE,
    "n_predict": 128,
    "stop": [],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.90,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "response_fields": [
        "content",
        "timings/prompt_n",
        "timings/prompt_ms",
        "timings/prompt_per_token_ms",
        "timings/prompt_per_second",
        "timings/predicted_n",
        "timings/predicted_ms",
        "timings/predicted_per_token_ms",
        "timings/predicted_per_second",
        "truncated",
        "tokens_cached",
    ],
}
"""A request in the shape of llama.vim's."""


def test_an_editor_gets_the_fields_that_it_reads(coder: Thinker) -> None:
    with saying(coder, " a + b<|endoftext|>") as engine:
        status, answer = engine.post(INFILL, **LLAMA_VIM)
    assert status == 200 and [*answer] == LLAMA_VIM["response_fields"]
    assert answer["content"] == " a + b" and answer["truncated"] is False
    assert answer["timings/predicted_n"] == len(coder.tokenizer.encode(" a + b<|endoftext|>"))


def test_other_files_come_first_and_the_typed_line_follows_the_prefix(coder: Thinker) -> None:
    submit = submitted(coder, INFILL, **LLAMA_VIM)
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
    submit = submitted(coder, INFILL, **body)
    assert len(submit.token_ids) == 511 - 128
    said = coder.tokenizer.decode(submit.token_ids)
    before, after = said.removeprefix("<|fim_prefix|>").removesuffix("<|fim_middle|>").split("<|fim_suffix|>")
    assert "far" not in before and before.endswith("near x =") and "off" not in after and after.startswith("close ")
    assert "sub.py" not in said
    short = prompt(coder, INFILL, **{**body, "input_prefix": "far ", "input_suffix": "close " * 380})
    assert "<|fim_prefix|>far x =<|fim_suffix|>" in short
    assert short.count("close") > 300, "the suffix takes what the prefix leaves"


def test_the_last_files_have_the_room_that_is_left(coder: Thinker) -> None:
    files = [{"filename": "old.py", "text": "old " * 300}, {"filename": "new.py", "text": "new " * 100}]
    said = prompt(coder, INFILL, **{**LLAMA_VIM, "input_extra": files})
    assert "new.py" in said and "old.py" not in said


def test_a_prompt_is_cached_without_an_answer(coder: Thinker) -> None:
    """llama.vim sends the context before somebody types."""
    body = {"input_prefix": BEFORE, "n_predict": 0, "temperature": 0.0, "samplers": [], "t_max_predict_ms": 1}
    with saying(coder, " a + b") as engine:
        for fields, expected in (({"response_fields": [""]}, {}), ({"response_fields": ["content"]}, {"content": ""})):
            assert engine.post(INFILL, **body, **fields) == (200, expected)
        _, whole = engine.post(INFILL, **body)
        assert (whole["content"], whole["tokens_predicted"]) == ("", 0)
    assert submitted(coder, INFILL, **body).params.max_tokens == 1


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
