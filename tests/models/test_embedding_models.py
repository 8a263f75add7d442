"""Embedding models of sentence-transformers: how they pool, and their tensors without a prefix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ssd.errors import UsageError
from ssd.execution.batch import FINAL, Row
from ssd.models.checkpoint import inspect, pooling_of
from ssd.models.gguf.importing import checkpoint_of
from ssd.models.pull import BUILTIN
from tests.models import ggufs, tiny


def write(directory: Path, **modes: object) -> Path:
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **modes}))
    return directory


def test_it_is_what_the_file_says_or_the_mean(tmp_path: Path) -> None:
    assert pooling_of(tmp_path / "none") == "mean"
    for number, (modes, expected) in enumerate(
        [
            ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
            ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
            ({}, "mean"),
        ]
    ):
        (tmp_path / str(number)).mkdir()
        assert pooling_of(write(tmp_path / str(number), **modes)) == expected


@pytest.mark.parametrize(
    ("modes", "words"),
    [
        ({"pooling_mode_cls_token": True}, "pools by pooling_mode_cls_token"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, "mean_tokens and pooling_mode_lasttoken"),
    ],
)
def test_others_are_refused(modes: dict[str, bool], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        pooling_of(write(tmp_path, **modes))


@pytest.mark.parametrize("tied", [True, False])
def test_tensors_without_a_prefix_and_without_a_last_layer(tied: bool, tmp_path: Path) -> None:
    model = tiny.oracle(tiny.model("qwen3", tmp_path / "language", tie_word_embeddings=tied)).model
    model.save_pretrained(tmp_path / "embedding")
    runner = tiny.runner(write(tmp_path / "embedding", pooling_mode_lasttoken=True))
    text = tiny.token_ids(9, seed=1)
    rows = [Row(text, 0, range(8), 1)]
    context = runner.prepare(rows, [FINAL])
    runner.forward(rows, context)
    with torch.inference_mode():
        expected = model(torch.tensor([text])).last_hidden_state[0]
    torch.testing.assert_close(context.hidden[FINAL], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("number", "expected"), [(1, "mean"), (3, "last")])
def test_the_pooling_of_a_gguf(number: int, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    ggufs.write(file, tokenizer=BUILTIN["smollm2-draft"].directory, llama__pooling_type=number)
    folder = checkpoint_of(file)
    assert pooling_of(folder) == expected
    assert "model.norm.weight" in inspect(folder).tensors
