"""`tools/gpu_report.py` from end to end, on a CPU with tiny models; and tests/gpu where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu_report
import pytest
import torch
from gpu_reporting.audit import exceptions, last_place
from gpu_reporting.writing import Part, markdown

from tests.faults.engine import gone

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
def test_every_part_runs_and_finds_nothing_wrong(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tools" / "gpu_report.py"), "--tiny", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path), "--seconds", "850"], capture_output=True, text=True, check=False
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
    """With all that it has started."""
    (tmp_path / "gpu_reporting").mkdir()
    (tmp_path / "gpu_reporting" / "__init__.py").touch()
    (tmp_path / "gpu_reporting" / "slow.py").write_text(
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
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT / 'tools')!r}, {str(ROOT)!r}]\n"
        "import gpu_reporting; gpu_reporting.__path__.append(" + repr(str(ROOT / "tools" / "gpu_reporting")) + ")\n"
        "import gpu_report; gpu_report.main()\n"
    )
    monkeypatch.setattr(gpu_report, "__file__", str(script))
    job = gpu_report.Job("cpu", ("cpu",), True, "", "", None, 0.0)
    began = time.monotonic()
    state, rows = gpu_report._started("slow", job, began + 30, tmp_path)
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


def test_an_exception_is_measured_in_units_of_the_last_place() -> None:
    plain = torch.tensor([[8.0, 8.0625, 1.0], [1.0, 2.0, 0.0], [3.0, 0.0, 2.0]], dtype=torch.bfloat16)
    other = torch.tensor([[9.0, 8.0, 1.0], [0.0, 2.0, 0.0], [3.0, 0.0, 9.0]], dtype=torch.bfloat16)
    assert [(each.position, each.ulp) for each in exceptions(plain, other)] == [(0, 1.0), (2, 64.0)]
    assert last_place(1.0, torch.float32) == 2.0**-23 and last_place(-5.0, torch.bfloat16) == 2.0**-5


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
