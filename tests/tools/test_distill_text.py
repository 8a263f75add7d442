"""Raw text beside the conversations of a corpus (`tools/distill/text.py`)."""

from __future__ import annotations

import base64
import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from ssd.errors import UsageError
from ssd.frontend.tokenization import Tokenizer
from tests.models import tiny
from tools.distill import training
from tools.distill.__main__ import main
from tools.distill.shards import Conversation
from tools.distill.text import NAME, TextPlan, text_shards, write_text

PROSE = {
    f"{number}.md": "\n".join(f"The {word} of section {number} is {word}, says part {part}." for part in range(60))
    for number, word in enumerate(("first", "second", "third"))
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tokenizer(tiny.llama(tmp_path_factory.mktemp("target"), vocab_size=300))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of three texts, and of files that are left out."""
    noise = random.Random(0).randbytes(3000)
    left_out = {
        "again.rst": PROSE["1.md"].replace("\n", " \n\n"),
        "image.txt": base64.encodebytes(noise).decode(),
        "small.js": "function(){" * 300,
        "table.py": ", ".join(map(str, range(1000, 1500))),
        "human_eval.md": "Complete this function. " * 50,
        "GSM8K/test.md": "A question about apples. " * 50,
        ".hidden/notes.md": "Nobody asked for this. " * 50,
        "picture.png": "a picture " * 50,
    }
    for name, text in (PROSE | left_out).items():
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "texts" / "latin.txt").write_bytes("Grüße aus Köln ".encode("latin-1") * 50)
    return tmp_path / "texts"


def written(target: Path, out: Path, plan: TextPlan) -> list[Conversation]:
    write_text(target, "digest", out, plan)
    return [example.text for example in training.examples(out, text_shards(out), labels=False, name=NAME)]


def test_pieces_are_the_tokens_of_the_files_in_the_order_of_the_seed(
    target: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put together again they are the texts, but for ends of less than 32 tokens."""
    monkeypatch.setattr("tools.distill.text._SHARD", 8)
    found = written(target, tmp_path / "a", TextPlan((str(folder),), piece=64))
    tokenizer = Tokenizer(target)
    first = tokenizer.encode("")
    assert all(text.prompt == max(1, len(first)) and 32 <= len(text.token_ids) <= 64 for text in found)
    assert len(text_shards(tmp_path / "a")) == -(-len(found) // 8) > 1
    names = {Path(text.opening).name for text in found}
    assert names - {"again.rst"} | {"1.md"} == PROSE.keys() and len(names) == 3
    texts = {str(folder / name): tokenizer.encode((folder / name).read_text(), False) for name in names}
    step = 64 - len(first)
    expected = [
        (opening, [*first, *ids[start : start + step]])
        for opening, ids in texts.items()
        for start in range(0, len(ids), step)
        if len(first) + len(ids[start : start + step]) >= 32
    ]
    pieces = [(text.opening, text.token_ids) for text in found]
    assert sorted(pieces) == sorted(expected) and pieces != expected
    again = written(target, tmp_path / "b", TextPlan((str(folder),), piece=64))
    other = written(target, tmp_path / "c", TextPlan((str(folder),), piece=64, seed=1))
    assert again == found and other != found and sorted(map(str, other)) == sorted(map(str, found))


def test_text_ends_at_its_limit_and_is_written_once(target: Path, folder: Path, tmp_path: Path) -> None:
    plan = TextPlan((str(folder),), tokens=400, piece=64)
    found = written(target, tmp_path / "out", plan)
    assert 400 - 32 < sum(len(text.token_ids) for text in found) <= 400
    (folder / "0.md").write_text("changed since")
    assert written(target, tmp_path / "out", plan) == found
    with pytest.raises(UsageError, match="begun with another tokens"):
        written(target, tmp_path / "out", TextPlan((str(folder),), tokens=500, piece=64))


def test_text_that_cannot_be_used_is_refused_first(target: Path, folder: Path, tmp_path: Path) -> None:
    for path, message in {
        folder / "human_eval.md": "is named after a benchmark",
        folder / "GSM8K": "is named after a benchmark",
        tmp_path / "nowhere": "there is no",
        folder / "image.txt": "no text to learn from",
    }.items():
        with pytest.raises(UsageError, match=message):
            written(target, tmp_path / "made" / path.name, TextPlan((str(path),)))
    flags = ["--out", str(tmp_path / "out"), "--layers", "0", "--answer-tokens", "24", "--text", str(folder)]
    done = CliRunner().invoke(main, [str(target), *flags])
    assert done.exit_code == 1 and "--text has no soft labels" in done.stderr
    assert not (tmp_path / "out").exists()
