"""Programme 3 of the GPU report on a CPU: a corpus and a draft of a tiny target."""

from __future__ import annotations

import hashlib
import importlib
import random
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from ssd.errors import UsageError
from tools.gpu_report import distilling, pieces
from tools.gpu_report.job import Job, Row
from tools.gpu_report.programmes import CALLS


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_both_calls_run_to_their_ends_and_leave_a_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the steps of the first call that the second one has too."""
    monkeypatch.setenv(distilling.FOLDER_VARIABLE, str(tmp_path / "kept"))
    out = tmp_path / "out"
    out.mkdir()
    job = Job("cpu", ("cpu",), True, "", "", True, "random", str(out), time.monotonic() + 500.0)
    rows: dict[str, dict[str, Row]] = {}
    for step in (CALLS["3a"][0], *CALLS["3b"]):
        part = importlib.import_module(f"tools.gpu_report.{step.part}")
        options = step.options | ({"processes": 1} if step.part == "corpus" else {})
        rows[step.title] = {row["name"]: row for row in part.rows(job, **options)}
        assert all(row.get("ok", True) for row in rows[step.title].values())
    written = rows["corpus"]["corpus"]
    assert written["state"] == "done" and written["conversations"] == 48 and written["shards"] == 2
    assert rows["draft"]["draft"]["ok"] and any("held_out_agreement" in row for row in rows["draft"].values())
    with tarfile.open(out / "draft.tar") as archive:
        assert {"model.safetensors", "config.json", "held_out.jsonl"} <= set(archive.getnames())
    assert [file.name for file in out.iterdir()] == ["draft.tar"]  # a log, rows and a report besides


def test_pieces_of_a_target_are_joined_and_others_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "complete", lambda source, directory: (directory / "config.json").write_text("{}"))
    content = random.Random(0).randbytes(3 * 2**19)
    (tmp_path / "model.gguf").write_bytes(content)
    monkeypatch.setattr(pieces.hub, "ensure", lambda name: tmp_path)
    done = CliRunner().invoke(pieces.main, ["--first", "1", "--carry", str(tmp_path / "carry")], catch_exceptions=False)
    assert "piece1/smollm2.xz.1: 1.0 MiB" in done.stdout
    parts = sorted((tmp_path / "carry").glob("piece*/*.xz.*"))
    assert len(parts) == 2 and all(part.stat().st_size <= 2**20 for part in parts)
    source = replace(pieces.SOURCES["smollm2"], sha256=hashlib.sha256(content).hexdigest())
    pieces.joined(parts, source, tmp_path / "target")
    assert (tmp_path / "target" / "model.gguf").read_bytes() == content
    for wrong in ([], parts[:1], [parts[0], parts[0]]):
        with pytest.raises(UsageError, match="the pieces are not"):
            pieces.joined(wrong, source, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_without_its_target_a_call_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(distilling.FOLDER_VARIABLE, str(tmp_path))
    job = Job("cpu", ("cpu",), False, "", "", True, "random", str(tmp_path), 0.0)
    with pytest.raises(UsageError, match="pieces were not joined"):
        distilling.recipe(job, tiny=False)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text("{}")
    recipe = distilling.recipe(job, tiny=False)
    assert "16384" in recipe.student
    assert distilling.recipe(job, tiny=True).target == tmp_path / "tiny-target"
