"""`tools/gpu_report` from end to end, on a CPU with tiny models; and tests/gpu where there is no GPU."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import tools.gpu_report.__main__ as gpu_report
from ssd.kernels.groups import Groups
from tests.faults.engine import gone
from tools import processes
from tools.gpu_report import gemm
from tools.gpu_report.audit import difference, row_of
from tools.gpu_report.job import Job
from tools.gpu_report.programmes import CALLS, EVERYTHING, Step
from tools.gpu_report.writing import Part, markdown, parts_of
from tools.soak import tiny

ROOT = Path(__file__).parents[2]


def report(out: Path, *arguments: str | Path) -> None:
    """Run the report of tiny models on a CPU. It must succeed."""
    command = [sys.executable, "-m", "tools.gpu_report", "--tiny", "--device", "cpu", "--out", str(out)]
    done = subprocess.run([*command, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_every_part_runs_and_finds_nothing_wrong(tmp_path: Path) -> None:
    report(tmp_path, "--seconds", "1700")
    parts = parts_of(tmp_path, EVERYTHING)
    assert [part.state for part in parts] == ["done"] * len(EVERYTHING)
    rows = {part.name: {row["name"]: row for row in part.rows} for part in parts}
    assert rows["tests"]["passed"]["count"] == rows["tests"]["passed"]["of"] >= 8
    verified = rows["forward"]["tiny, bf16, context 64, batch 4, K = 7"]
    assert rows["forward"]["copy"]["gb_s"] > 0 and verified["of_copy"] > 0
    assert rows["audit"]["K = 7"]["positions"] == 72
    for mode, temperature in product(("sd", "ssd"), (0, 1)):
        compared = rows["ids"][f"{mode}, T = {temperature}, float32, deterministic"]
        assert compared["equal"] == 4 and compared["accepted_tokens"] > 0
    kills = rows["ids"]["3 kills of the draft"]
    assert (kills["kills"], kills["altered"]) == (3, 0) and kills["answers"] >= 4
    measured = {name.rpartition(" ")[2]: row for name, row in rows["modes"].items() if "batch" in name}
    assert measured.keys() == {"ar", "sd", "ssd"} and all(row["tok_s"] > 0 for row in measured.values())
    assert measured["sd"]["drafted"] > 0 and measured["sd"]["late_compiles"] == 0
    assert rows["assisted"]["not run"]["why"] == "a made pair has no files with weights"
    text = (tmp_path / "report.md").read_text()
    assert "Nothing is wrong in what was run." in text and "| K = 7 | 72 |" in text
    assert "==== ids" in (tmp_path / "log.txt").read_text()
    assert {file.name for file in tmp_path.glob("[!t]*")} == {"log.txt", "report.md", "rows.jsonl"}
    assert len(list(tmp_path.glob("trace-*.json"))) == 3  # of each mode


def test_some_parts_alone_are_in_the_report(tmp_path: Path) -> None:
    report(tmp_path, "--only", "forward", "--only", "audit")
    parts = parts_of(tmp_path, [step for step in EVERYTHING if step.part in ("forward", "audit")])
    assert [part.state for part in parts] == ["done", "done"]
    text = (tmp_path / "report.md").read_text()
    assert "Nothing is wrong in what was run." in text and "| K = 7 | 72 |" in text


@pytest.mark.thorough
def test_products_of_few_bits_are_checked_and_a_library_that_is_not_there_stops_none(tmp_path: Path) -> None:
    """By Triton's interpreter. `--only` names a step of a programme, without its call."""
    report(tmp_path, "--only", "gemm, few bits")
    (part,) = parts_of(tmp_path, [step for step in CALLS["l1"] if step.title == "gemm, few bits"])
    rows = {row["name"]: row for row in part.rows}
    assert part.state == "done" and len(rows) == 5 * 6
    for kind in ("fp8", "int4"):
        found = rows[f"tiny gate_up, {kind}"]
        assert found["ok"] and 0 < found["off"] < 0.01
        assert found["same in any batch"] and found["same at any place of 16"]
        assert all(found[f"of_copy at {count}"] > 0 for count in (1, 8, 16))
        assert rows[f"tiny gate_up, {kind}, humming"]["not run"]


def test_a_wrong_product_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, 128, dtype=torch.bfloat16)
    monkeypatch.setattr(gemm, "_product", lambda kind, weight: lambda x: 1.05 * (x @ weight.dequantized().T))
    assert gemm._off("int4", (64, 128), x)["ok"] is False
    monkeypatch.setattr(gemm, "_product", lambda kind, weight: lambda x: x @ weight.dequantized().T)
    assert gemm._off("int4", (64, 128), x)["ok"] is True


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_humming_kernels_takes_what_the_report_gives_it(kind: str) -> None:
    """The package's own description of the tensors, and its parameters. Its kernels need a GPU."""
    layer, schema = pytest.importorskip("humming.layer"), pytest.importorskip("humming.schema")
    config = pytest.importorskip("humming.config").ComputeConfig
    weight = gemm._made_weight(kind, (128, 256), torch.device("cpu"))
    assert isinstance(weight, Groups)
    asked = schema.BaseWeightSchema.from_config(gemm.hummed_config(weight)).get_tensors_attrs(128, 256, torch.bfloat16)
    given = gemm.hummed_tensors(weight)
    assert {name: (attrs["shape"], attrs["dtype"]) for name, attrs in asked.items()} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in given.items()
    }
    assert {"shape_n", "shape_k", "weight_config", "torch_dtype"} <= set(
        inspect.signature(layer.HummingLayer).parameters
    )
    assert "compute_config" in inspect.signature(layer.HummingLayer.forward).parameters
    assert config(use_batch_invariant=True, gemm_type="dense").use_batch_invariant


def test_codes_for_humming_kernels_lie_from_the_lowest_bits_up() -> None:
    codes = torch.arange(16, dtype=torch.uint8)[None]
    words = gemm.hummed_tensors(Groups(codes, torch.ones(1, 1), None, zero=8))["weight"]
    assert [words[0, 0].item() >> 4 * place & 15 for place in range(8)] == list(range(8))
    words = gemm.hummed_tensors(Groups(codes, torch.ones(1, 1), None, e4m3=True))["weight"]
    assert words[0, 1].item() == 0x07060504


@pytest.mark.thorough
def test_a_pair_with_weights_is_measured_too(tmp_path: Path) -> None:
    """The step that needs files, transformers' own generation, with a pair on the disk."""
    target, draft = tiny.pair(tmp_path)
    report(tmp_path / "out", "--only", "assisted", "--target", target, "--draft", draft)
    (part,) = parts_of(tmp_path / "out", [step for step in EVERYTHING if step.part == "assisted"])
    assert {row["name"] for row in part.rows} == {"transformers, generate", "transformers, assisted generation"}


SLOW = """import signal, subprocess, time
def rows(job):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(['sleep', '600'])
    yield {'name': 'child', 'pid': child.pid}
    yield {'name': 'child', 'pid': child.pid, 'again': True}
    time.sleep(600)
"""
BROKEN = """import sys
def rows(job):
    yield {'name': 'found', 'of': 1}
    print('a word of the step')
    sys.exit('no such device')
"""


def test_a_step_that_does_not_end_or_breaks_loses_nothing_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step's limit is over as soon as both rows of the first are on the disk; what it has started ends with it."""
    for name, text in (("slow", SLOW), ("broken", BROKEN)):
        (tmp_path / f"{name}.py").write_text(text)
    script = tmp_path / "report.py"
    script.write_text(
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n"
        "import slow, broken\n"
        "sys.modules |= {'tools.gpu_report.slow': slow, 'tools.gpu_report.broken': broken}\n"
        "from tools.gpu_report.__main__ import main; main()\n"
    )
    out = tmp_path / "out"
    out.mkdir()

    class Started(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            deadline, kept = time.monotonic() + 300, out / "rows.jsonl"
            while self.poll() is None and "again" not in kept.read_text():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            return super().wait(timeout)

    monkeypatch.setattr(processes, "command", lambda _, *arguments: [sys.executable, str(script), *arguments])
    monkeypatch.setattr(subprocess, "Popen", Started)
    job = Job("cpu", ("cpu",), True, "", "", True, "random", str(out), time.monotonic() + 900.0)
    plan = (Step("slow", 0.5), Step("broken", 300.0))
    slow, broken = gpu_report._report(job, plan, tmp_path, out)
    assert slow.state == "stopped at its limit"
    ((row),) = slow.rows
    assert row["again"] and gone(row["pid"])
    assert broken.state == "failed: no such device" and broken.rows == [{"name": "found", "of": 1}]
    assert "a word of the step" in (out / "log.txt").read_text()


def test_calls_have_parts_that_take_their_options_and_end_within_ten_minutes() -> None:
    titles = [step.title for steps in CALLS.values() for step in steps]
    assert len(set(titles)) == len(titles)
    for call, steps in CALLS.items():
        assert sum(step.expected for step in steps) < 600, call
        for step in steps:
            takes = inspect.signature(importlib.import_module(f"tools.gpu_report.{step.part}").rows).parameters
            assert set(step.options) <= set(takes), (call, step.title)
            assert 0 < step.expected <= step.seconds, (call, step.title)


def test_what_a_part_dies_of_is_in_the_report() -> None:
    parts: list[Any] = [
        Part("audit", "Predicted.", True, "failed: no such model", 1.0),
        Part("tests", "Predicted.", True, "stopped at its limit", 1.0),
        Part("forward", "Predicted.", False, "stopped at its limit", 1.0),
        Part("ids", "", True, "done", 2.0, [{"name": "sd", "equal": 3, "ok": False}, {"name": "ssd", "ok": True}]),
    ]
    text = markdown({"gpus": ["one"]}, parts)
    assert (
        "Wrong: audit: failed: no such model; tests: stopped at its limit; ids: sd" in text
        and "| sd | 3 | False |" in text
    )


def test_best_tokens_may_differ_in_near_ties_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(200, 500, generator=generator)
    noisy = plain + 0.005 * torch.randn(200, 500, generator=generator)
    found = difference(plain, noisy)
    row = row_of(4, found + difference(plain, plain))
    assert row["positions"] == 400 and row["exceptions"] == len(found.apart) and row["ok"]
    assert row["noise"] == pytest.approx(0.005 / 2**0.5, rel=0.01)
    values, tokens = plain.topk(2)
    place = int((values[:, 0] - values[:, 1]).argmax())  # no tie
    wrong = noisy.clone()
    wrong[place, tokens[place, 1]] = values[place, 0] + 1.0
    assert not row_of(4, difference(plain, wrong))["ok"]
    assert not row_of(4, difference(plain, plain + 0.1 * torch.randn(200, 500, generator=generator)))["ok"]


def test_gpu_tests_say_clearly_that_there_is_no_gpu() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/gpu/test_ipc.py"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "tests/gpu needs a CUDA device, and torch finds none" in done.stdout + done.stderr
