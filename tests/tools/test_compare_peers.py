"""The comparison with other engines, on tiny models; llama.cpp is there only as far as Python sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import compare_peers
import pytest
import torch
from click.testing import CliRunner, Result
from peers.contestants import CONTESTANTS, Files
from peers.memory import resident_mib
from peers.serving import Answer, Begin
from peers.worker import PeerError, Worker

from tests.models import ggufs, tiny

# A package as pip would have it, whose answers count on from the last token of the prompt.
LLAMA_CPP = {
    "llama_cpp/__init__.py": """
from gguf import GGUFReader

class Llama:
    def __init__(self, model_path, n_ctx, n_threads, n_threads_batch, verbose, draft_model=None):
        self.kind = next(t.tensor_type.name for t in GGUFReader(model_path).tensors if t.name == "token_embd.weight")
        self.tokens = 1 if draft_model is None else draft_model.num_pred_tokens

    def generate(self, prompt, temp):
        assert temp == 0.0
        while True:
            prompt = [*prompt, prompt[-1] + (self.tokens if self.kind == "Q8_0" else 100)]
            yield prompt[-1]

    def close(self):
        pass
""",
    "llama_cpp/llama_speculative.py": """
class LlamaPromptLookupDecoding:
    def __init__(self, num_pred_tokens):
        self.num_pred_tokens = num_pred_tokens
""",
    "llama_cpp_python-0.3.dist-info/METADATA": "Metadata-Version: 2.1\nName: llama-cpp-python\nVersion: 0.3\n",
}


@pytest.fixture
def llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site"
    for name, text in LLAMA_CPP.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = tiny.tokenizer(tiny.llama(folder / "target", **ggufs.SIZES))
    return target, tiny.noisy_copy(target, folder / "draft", 0.02)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("a b", "b c", "c d")))
    return file


def compare(*arguments: object) -> Result:
    return CliRunner().invoke(compare_peers.main, [str(argument) for argument in arguments])


def test_engines_take_turns_and_say_the_same(pair: tuple[Path, Path], prompts: Path, tmp_path: Path) -> None:
    names = ("transformers", "ssd")
    asked = [word for name in names for word in ("--peers", name)]
    file = tmp_path / "report.json"
    size = ("--prompts", 3, "--tokens", 12, "--json", file)
    result = compare(prompts, "--target", pair[0], "--draft", pair[1], *size, *asked)
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert [(row["engine"], row["same_ids"], row["answers"]) for row in report["rows"]] == [(n, 3, 3) for n in names]
    assert all(row["memory_mib"] > 50 and min(row["tok_s"]) > 0 for row in report["rows"])
    speeds = {name: sorted(speeds) for name, speeds in report["runs"].items()}
    assert [row["tok_s"][0] for row in report["rows"]] == [speeds[name][1] for name in names]
    assert report["ratios"].keys() == {"ssd"} and report["ratios"]["ssd"].keys() == set(names[:-1])
    ratios = [one / other for one, other in zip(*(report["runs"][name] for name in ("ssd", names[0])), strict=True)]
    assert report["ratios"]["ssd"][names[0]][0] == sorted(ratios)[1]


def test_transformers_says_the_same_whatever_assists_it(pair: tuple[Path, Path]) -> None:
    """In this process, which has imported it."""
    prompt, told = tiny.token_ids(20, 1, ggufs.SIZES["vocab_size"]), dict[str, list[list[int]]]()
    for name in ("transformers", "transformers-draft", "transformers-lookup"):
        with CONTESTANTS[name].opened(Files(*pair, {}), torch.get_num_threads()) as answering:
            answering(prompt, 12, told.setdefault(name, []).append)
    plain = told["transformers"]
    assert [len(ids) for ids in plain] == [1] * 12  # as they come
    for chunks in told.values():
        assert [*chain(*chunks)] == [*chain(*plain)]
    assert len(told["transformers-draft"]) < 12  # several at a time


@pytest.mark.usefixtures("llama_cpp")
def test_llama_cpp_reads_files_that_are_written_for_it(
    pair: tuple[Path, Path], prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "report.json"
    asked = ("--peers", "llama.cpp-f32", "--peers", "llama.cpp-q8", "--peers", "llama.cpp-q8-lookup")
    answers: dict[str, list[int]] = {}
    answer = Worker.answer

    def noted(worker: Worker, prompt: list[int], tokens: int) -> Answer:
        found = answer(worker, prompt, tokens)
        answers[worker._name] = [token - prompt[-1] for token in found.token_ids]
        return found

    monkeypatch.setattr(Worker, "answer", noted)
    result = compare(prompts, "--target", pair[0], "--prompts", 2, "--tokens", 3, "--json", file, *asked)
    assert result.exit_code == 0, result.output
    assert answers == {
        "llama.cpp-f32": [100, 200, 300],
        "llama.cpp-q8": [1, 2, 3],
        "llama.cpp-q8-lookup": [2, 4, 6],
    }
    report = json.loads(file.read_text())
    assert {row["same_ids"] for row in report["rows"]} == {None} and report["ratios"] == {}
    assert report["environment"]["packages"] == {"llama_cpp": "0.3"}


def test_what_is_not_there_is_left_out_with_a_line(
    pair: tuple[Path, Path], prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare_peers, "find_spec", lambda name: None)
    asked = ("--peers", "llama.cpp-q8", "--peers", "transformers")
    result = compare(prompts, "--target", pair[0], *asked)
    assert result.exit_code == 2
    assert "llama.cpp-q8 is left out: llama-cpp-python is not installed (pip install -e '.[peers]')" in result.output
    assert "nobody is left to compare" in result.output
    monkeypatch.undo()
    result = compare(prompts, "--target", pair[0], "--peers", "ssd")
    assert result.exit_code == 2 and "ssd is left out: there is no draft (--draft)" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompts", 0], "--prompts"),
        (["--tokens", 1], "--tokens"),
        (["--cores", "first"], "--cores 'first': expected core numbers"),
        (["--cores", "9999"], "--cores '9999': this process may use"),
        (["--json", "nowhere/x.json"], "nowhere is no folder"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_loaded(
    prompts: Path, tmp_path: Path, arguments: list[object], words: str
) -> None:
    result = compare(prompts, "--target", tmp_path / "nothing", *arguments)
    assert result.exit_code != 0 and words in result.output and not isinstance(result.exception, ValueError)


@pytest.mark.usefixtures("llama_cpp")
@pytest.mark.parametrize("name", ["llama.cpp-q8", "ar"])
def test_what_does_not_load_says_why(name: str, tmp_path: Path) -> None:
    files = Files(tmp_path / "nothing", None, {"Q8_0": tmp_path / "nothing.gguf"})
    with pytest.raises(PeerError, match=rf"{name}: .*nothing"):
        Worker(Begin(name, files, sorted(os.sched_getaffinity(0))))


def test_speed_leaves_the_prompt_out() -> None:
    assert Answer([0] * 10, [(100.0, 2), (101.0, 6), (102.0, 10)]).tokens_per_second == 4.0


SHARING = """
import mmap, os, subprocess, sys
_, *given = sys.argv
descriptor = int(given[0]) if given else os.memfd_create("shared", 0)
os.ftruncate(descriptor, 64 << 20)
shared = mmap.mmap(descriptor, 64 << 20)
shared.write(b"x" * (64 << 20))
if not given:
    own = b"x" * (64 << 20)
    subprocess.Popen([sys.executable, __file__, str(descriptor)], pass_fds=[descriptor])
print("ready", flush=True)
sys.stdin.read()
"""


def test_shared_pages_are_counted_once(tmp_path: Path) -> None:
    """A process with 64 MiB of its own and its child share 64 MiB, and the interpreter."""
    file = tmp_path / "sharing.py"
    file.write_text(SHARING)
    process = subprocess.Popen([sys.executable, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        assert 128 <= resident_mib(process.pid) < 128 + 64
    finally:
        process.kill()
        process.communicate()
