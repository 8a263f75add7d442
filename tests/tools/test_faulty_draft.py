"""The timing of faulty drafts: the faults, the figures, and a short run."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import tools.faulty_draft.__main__ as faulty_draft
from ssd.client import Client
from ssd.launch.supervisor import Engine
from ssd.models import hub
from tests.faults.engine import running_engine
from tools.faulty_draft.__main__ import Fault, Pair, figures, lying_copy, pair

PATIENCE_S = 30.0


@pytest.fixture
def process() -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"]) as child:
        yield child.pid
        child.kill()


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def becomes(pid: int, stopped: bool) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while (state(pid) == "T") != stopped:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def stopping(pid: int, fault: Fault) -> AbstractContextManager[threading.Event]:
    return faulty_draft.disturbed(cast(Engine, SimpleNamespace(pids={"draft": pid})), fault)


def test_a_stopped_draft_stays_stopped_until_the_end(process: int) -> None:
    with stopping(process, Fault(stopped=0.005)) as begin:
        assert state(process) != "T"
        begin.set()
        assert becomes(process, stopped=True)
        time.sleep(0.05)
        assert state(process) == "T"
    assert becomes(process, stopped=False)


def test_nothing_continues_it_before_the_end(process: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[signal.Signals] = []
    monkeypatch.setattr(faulty_draft, "_signal", lambda engine, number: sent.append(number))
    with stopping(process, Fault(stopped=0.001)) as begin:
        begin.set()
        while len(sent) < 3:
            time.sleep(0.001)
    assert {*sent[:-1]} == {signal.SIGSTOP} and sent[-1] == signal.SIGCONT


def test_a_draft_on_duty_runs_in_between(process: int) -> None:
    with stopping(process, Fault(stopped=0.005, runs=0.005)) as begin:
        begin.set()
        for _ in range(3):
            assert becomes(process, stopped=True) and becomes(process, stopped=False)
    assert becomes(process, stopped=False)


def test_other_drafts_are_left_alone(process: int) -> None:
    with stopping(process, Fault(lying=True)) as begin:
        begin.set()
        time.sleep(0.02)
        assert state(process) != "T"


def test_a_liar_is_the_same_model_with_other_matrices(tmp_path: Path) -> None:
    source = hub.ensure("smollm2-draft")
    copy = lying_copy(source, tmp_path / "draft")
    assert {file.name for file in copy.iterdir()} == {file.name for file in source.iterdir()}
    for file in source.glob("*.safetensors"):
        before, after = load_file(file), load_file(copy / file.name)
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert (tensor.shape, tensor.dtype) == (after[name].shape, after[name].dtype)
            assert torch.equal(tensor, after[name]) == (tensor.dim() == 1)


def test_the_ratio_is_the_median_of_the_pairs() -> None:
    pairs = [Pair(10.0, speed, 20, 10, 2, equal, speed / 2) for speed, equal in ((9.0, 2), (20.0, 2), (8.0, 1))]
    row = figures("stopped", 2, pairs)
    assert (row["ratio"], row["ar_tok_s"], row["ssd_tok_s"]) == (0.9, 10.0, 9.0)
    assert (row["answers"], row["equal"], row["acceptance_length"]) == (6, 5, 1.5)
    assert (row["ratios"], row["draft_step_ms"]) == ([0.9, 2.0, 0.8], 4.5)
    assert figures("stopped", 2, pairs[:1])["quartiles"] == [0.9, 0.9]


@pytest.mark.parametrize("order", [("ar", "ssd"), ("ssd", "ar")])
def test_a_pair_has_both_modes_on_the_same_prompts(order: tuple[str, str]) -> None:
    with running_engine() as engine, Client(engine.address) as client:
        found = pair(client, ["one", "two"], 8, order)
    assert (found.answers, found.equal) == (2, 2)
    assert found.ar > 0 and found.ssd > 0


def test_the_command_times_the_real_engine(tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "faults.json"
    prompts.write_text("".join(json.dumps({"prompt": f"Count to {n}."}) + "\n" for n in range(6)))
    arguments = ["--fault", "stopped", "--batch", "2", "--pairs", "1", "--tokens", "6", "--json", str(out)]
    result = CliRunner().invoke(faulty_draft.main, ["--dataset", str(prompts), *arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["fault"], row["batch"], row["answers"], row["equal"]) == ("stopped", 2, 2, 2)
    assert "stopped" in result.output
