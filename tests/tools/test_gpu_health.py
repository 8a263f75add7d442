"""Rows of the GPU report that have an engine: what they say of its draft and its compiles, and when they are wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from ssd.config.engine import EngineConfig
from ssd.config.params import SamplingParams
from ssd.launch import mps
from tools.gpu_report import ids, pipeline
from tools.gpu_report.health import Health
from tools.gpu_report.job import Job, Row, made_pair
from tools.gpu_report.programmes import CALLS, SECONDS, START_S
from tools.gpu_report.writing import Part, markdown

LATE = "ssd draft: Triton compiled attend_kernel after the start, in 1.21 s\n"
LOADED = "ssd target: Triton loaded merge_kernel after the start, in 0.02 s\n"
GIVEN_UP = "ssd target: goes on without the draft: there is no sign of life\n"
BACK = "ssd target: the draft is of use again\n"


def job_in(folder: Path, target: str = "", draft: str = "") -> Job:
    return Job("cpu", ("cpu",), True, target, draft, True, "random", str(folder), time.monotonic() + 300.0, "step")


def told(job: Job, words: str) -> None:
    with job.log.open("a") as file:
        file.write(words)


def test_a_row_says_what_the_log_said_since_the_row_before(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    told(job, LATE + GIVEN_UP)  # while the engine starts
    health = Health(job)
    assert health.judged({"name": "quiet", "ok": True}) == {
        "name": "quiet",
        "ok": True,
        "breaker": "",
        "late_compiles": 0,
    }
    told(job, GIVEN_UP + "another line\n" + BACK)
    found = health.judged({"name": "given up", "ok": True})
    assert found["breaker"] == "goes on without the draft: there is no sign of life; the draft is of use again"
    assert found["ok"]
    told(job, LATE + LOADED)
    found = health.judged({"name": "late", "ok": True})
    assert (found["late_compiles"], found["compiled"], found["ok"]) == (2, "attend_kernel merge_kernel", False)
    assert health.judged({"name": "later"})["late_compiles"] == 0
    assert not health.judged({"name": "late", "ok": True})["ok"]  # takes the place of the wrong one


@pytest.mark.parametrize("part", [ids, pytest.param(pipeline, marks=pytest.mark.monitor)])
def test_every_drafting_mode_has_an_engine_of_its_own_and_no_suffix_memory(
    part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first engine `ar` may be another mode. T = 1 comes before T = 0, and no draft token makes a row wrong."""
    engines: list[list[tuple[str, float]]] = []
    job = job_in(tmp_path, *made_pair(tmp_path, tiny=True))

    class Asked:
        def generate(self, prompts: Any, params: Any) -> list[Any]:
            each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
            engines[-1].append((each[0].speculation.mode, each[0].temperature))
            drafted = 3 if each[0].temperature else 0
            metrics = dict.fromkeys(("rounds", "hits", "misses", "draft_step_ms", "mean_acceptance_length"), 1)
            metrics |= dict.fromkeys(("drafted_tokens", "accepted_tokens", "verify_ms", "draft_wait_ms"), drafted)
            return [SimpleNamespace(token_ids=[7], metrics=SimpleNamespace(**metrics)) for _ in prompts]

    @contextmanager
    def watched(job: Job, config: EngineConfig, restarts: Any = None) -> Iterator[Any]:
        assert config.suffix_memory == 0
        engines.append([])
        yield SimpleNamespace(address="ipc:///nobody", pids={}), Asked(), Health(job)

    monkeypatch.setattr(part, "watched", watched)
    monkeypatch.setattr(ids, "_killed", lambda *_: iter(()))
    monkeypatch.setattr(pipeline, "_SETTLES_S", 0.0)
    rows: dict[str, Row] = {row["name"]: row for row in part.rows(job)}
    assert not any("failed" in row for row in rows.values())
    used = [list(dict.fromkeys(mode for mode, _ in asked if mode != "ar")) for asked in engines]
    assert [modes for modes in used if modes] == [["sd"], ["ssd"]]
    if part is ids:
        assert [temperature for _, temperature in engines[1]] == [1.0, 0.0]
        assert [row["ok"] for row in rows.values()] == [True, False, True, False]


def test_both_programmes_fit_into_thirteen_minutes_of_a_machine() -> None:
    assert sum(SECONDS.values()) + START_S * len(SECONDS) <= 780.0
    for call, seconds in SECONDS.items():
        assert sum(step.expected for step in CALLS[call]) <= seconds, call
        assert all(step.prediction and step.decision for step in CALLS[call]), call


def test_a_decision_stands_beside_the_result() -> None:
    (step, *_) = CALLS["l1"]
    text = markdown({}, [Part("probe", step.prediction, decision=step.decision)])
    assert f"*Predicted*: {step.prediction}" in text and f"*Decision*: {step.decision}" in text


def test_a_share_of_mps_is_the_drafts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the environment it would limit the target, too."""
    monkeypatch.setattr(mps, "DRAFT_SHARE", 20)
    asked = []

    def cases(*given: Any) -> Iterator[Any]:
        asked.append(given[-1])
        yield from ()

    monkeypatch.setattr(pipeline, "cases", cases)
    job = structs.replace(job_in(tmp_path), device="cuda")
    assert not list(pipeline.rows(job, share=50, options={"enforce_eager": True}))
    assert asked == [{"enforce_eager": True, "mps": True}]
    assert mps.draft_environment({}) == {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}
    assert all("CUDA_MPS" not in variable for call in CALLS.values() for step in call for variable in step.environment)
