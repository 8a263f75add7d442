"""`tools/gpu_report` from end to end, on a CPU with tiny models; and tests/gpu where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tools.gpu_report.__main__ as gpu_report
from tests.faults.engine import gone
from tools import processes
from tools.gpu_report.audit import difference, row_of
from tools.gpu_report.writing import Part, markdown

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(1800)
def test_every_part_runs_and_finds_nothing_wrong(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.gpu_report", "--tiny", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path), "--seconds", "1700"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    parts = {part["name"]: part for part in report["parts"]}
    assert [part["state"] for part in parts.values()] == ["done"] * len(gpu_report.PLAN)
    rows = {name: {row["name"]: row for row in part["rows"]} for name, part in parts.items()}
    assert len(rows["tests"]) >= 8
    assert rows["forward"]["copy"]["gb_s"] > 0 and rows["forward"]["tiny, batch 4, K = 7"]["of_copy"] > 0
    assert rows["audit"]["K = 7"]["positions"] == 72
    assert rows["ids"]["ssd, T = 1, float32, deterministic"]["equal"] == 4
    kills = rows["ids"]["3 kills of the draft"]
    assert (kills["kills"], kills["altered"]) == (3, 0) and kills["answers"] >= 4
    assert {row["name"].rpartition(" ")[2] for row in parts["modes"]["rows"]} == {"ar", "sd", "ssd"}
    assert set(rows["assisted"]) == {"transformers, generate", "transformers, assisted generation"}
    text = (tmp_path / "report.md").read_text()
    assert "Nothing is wrong in what was run." in text and "| K = 7 | 72 |" in text


def test_a_part_that_does_not_end_is_ended_and_what_it_found_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all that it has started. Its limit is over as soon as both rows are written."""
    (tmp_path / "slow.py").write_text(
        "import signal, subprocess, time\n"
        "def rows(job):\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        "    yield {'name': 'child', 'pid': child.pid}\n"
        "    yield {'name': 'child', 'pid': child.pid, 'again': True}\n"
        "    time.sleep(600)\n"
    )
    script = tmp_path / "report.py"
    script.write_text(
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]\n"
        "import slow; sys.modules['tools.gpu_report.slow'] = slow\n"
        "from tools.gpu_report.__main__ import main; main()\n"
    )

    class Started(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            deadline, found = time.monotonic() + 60, tmp_path / "slow.rows"
            while self.poll() is None and not (found.exists() and found.read_text().count("\n") == 2):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            return super().wait(timeout)

    monkeypatch.setattr(processes, "command", lambda _, *arguments: [sys.executable, str(script), *arguments])
    monkeypatch.setattr(subprocess, "Popen", Started)
    job = gpu_report.Job("cpu", ("cpu",), True, "", "", "random", 0.0)
    began = time.monotonic()
    state, rows = gpu_report._started("slow", job, began, tmp_path)
    assert state == "stopped at its limit" and time.monotonic() - began < 60
    ((row),) = rows
    assert row["again"] and gone(row["pid"], within_s=5)


def test_what_a_part_dies_of_is_in_the_report() -> None:
    parts: list[Any] = [
        Part("audit", "About.", "failed: no such model", 1.0),
        Part("ids", "About.", "done", 2.0, [{"name": "sd", "equal": 3, "ok": False}, {"name": "ssd", "ok": True}]),
    ]
    text = markdown({"gpus": ["one"]}, parts)
    assert "Wrong: audit: failed: no such model; ids: sd" in text and "| sd | 3 | False |" in text


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
        [sys.executable, "-m", "pytest", "-q", "tests/gpu"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1 and "tests/gpu needs a CUDA device, and torch finds none" in done.stdout + done.stderr
