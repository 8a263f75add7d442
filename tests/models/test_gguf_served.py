"""A GGUF with a SentencePiece vocabulary and a chat template in its metadata, through all processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from ssd import LLM, SamplingParams
from ssd.config.params import Mode, Speculation
from ssd.models.hub import resolve
from tests.models import ggufs
from tests.models.test_gguf_tokenizer import sentencepiece, spm_fields

TEMPLATE = "{% for turn in messages %}<s>{{ turn.role }}\n{{ turn.content }}</s>{% endfor %}"
TURNS = [{"role": "user", "content": "it's  the\tquick brown fox, 한 12"}]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and its draft, which is the same but for a little noise in one table."""
    folder, tokens = tmp_path_factory.mktemp("served"), sentencepiece(False)[1]
    fields = spm_fields(tokens, bos_token_id=1, eos_token_id=2) | {"tokenizer.chat_template": TEMPLATE}
    sizes = {"vocab_size": len(tokens), "head_dim": 16, "num_hidden_layers": 3}
    noise = np.random.default_rng(0).standard_normal((96, 64)).astype(np.float32)
    files = folder / "target.gguf", folder / "draft.gguf"
    ggufs.write_model(files[0], "qwen3", "Q8_0", fields, **sizes)
    ggufs.write_model(files[1], "qwen3", "Q4_1", fields, {"blk.2.ffn_up.weight": noise}, **sizes)
    return files


@pytest.fixture(scope="module")
def llm(pair: tuple[Path, Path]) -> Iterator[LLM]:
    with LLM(str(pair[0]), draft=(str(pair[1]),), max_num_seqs=2) as llm:
        yield llm


def asked(mode: Mode, temperature: float) -> SamplingParams:
    said = {"temperature": temperature, "seed": 3, "max_tokens": 60, "ignore_eos": True}
    return SamplingParams(speculation=Speculation(mode, 4, (3,), "jit"), **said)  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.thorough), 0.9])
def test_every_mode_says_what_ar_says(llm: LLM, pair: tuple[Path, Path], temperature: float) -> None:
    tokenizer = Tokenizer.from_file(str(resolve(str(pair[0])) / "tokenizer.json"))
    (expected,) = llm.chat(TURNS, asked("ar", temperature))
    prompt = tokenizer.encode(f"<s>user\n{TURNS[0]['content']}</s>", add_special_tokens=False).ids
    (same,) = llm.generate([prompt], asked("ar", temperature))
    assert same.token_ids == expected.token_ids and len(expected.token_ids) == 60
    for mode in ("sd", "ssd", "ngram", "auto"):
        (found,) = llm.chat(TURNS, asked(mode, temperature))
        assert found.token_ids == expected.token_ids, mode
        assert mode != "sd" or found.metrics.accepted_tokens > 0
    # Bytes that are no character come back otherwise: the library shows a whole run of bytes as such.
    readable = [index for index in range(tokenizer.get_vocab_size()) if not 3 <= index < 259]
    chunks = list(llm.stream(TURNS, replace(asked("ssd", temperature), allowed_token_ids=readable)))
    completion = chunks[-1].completion
    assert completion is not None and len(chunks) > 3
    assert "".join(chunk.text for chunk in chunks) == completion.text == tokenizer.decode(completion.token_ids)
