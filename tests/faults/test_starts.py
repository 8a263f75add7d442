"""Any process may be killed while an engine starts: it comes up all the same, quietly, and leaves nothing behind.

`python -m tools.soak --starts 40` kills 40 of each kind, in each form of engine."""

from __future__ import annotations

import json
import random
import signal
from urllib.request import urlopen

import msgspec
import pytest

from ssd.client import Client
from ssd.config.params import SamplingParams, Speculation
from ssd.errors import EngineDeadError
from ssd.launch import liveness
from ssd.launch.liveness import LOOK_S
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.server import ServerOptions
from ssd.launch.supervisor import Engine
from tests.faults.engine import sending
from tests.scripted_engine import PATIENCE_S, SMALL
from tools.soak.starts import FORMS, PROMPT, TOKENS, VICTIMS, Kill, start

FEW = SamplingParams(max_tokens=TOKENS, temperature=0, seed=1)
WITHIN_S = 0.4  # a start takes more


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """The answer after an undisturbed start."""
    one = start("generate", SMALL)
    assert not one.wrong
    return one.token_ids


@pytest.mark.parametrize("form", [FORMS[0], *(pytest.param(form, marks=pytest.mark.thorough) for form in FORMS[1:])])
def test_kills_at_random_instants_of_a_start_end_no_engine(form: str, expected: list[int]) -> None:
    luck = random.Random(form)
    for _ in range(2):
        kills = {role: Kill(luck.uniform(0.0, WITHIN_S), luck.random()) for role in ("target", "frontend", "text")}
        one = start(form, SMALL, kills)
        assert one.killed
        assert (one.wrong, one.token_ids) == ("", expected)


@pytest.mark.parametrize(("role", "number"), [("target", signal.SIGKILL), ("frontend", signal.SIGTERM)])
def test_too_many_deaths_end_the_engine_and_the_cause_counts_them(role: str, number: signal.Signals) -> None:
    engine = Engine(resolve(EngineOptions(**SMALL)))
    cause = rf"^the {role} process ended: killed by {number.name}; it dies again and again \(6 times\)$"
    with sending(engine, role, number) as sent, pytest.raises(EngineDeadError, match=cause):
        engine.start()
    assert sent() == 6 and not engine.pids


def test_a_pair_loads_with_kills_of_all_its_processes_and_comes_up_without_a_draft_that_always_dies(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine(resolve(EngineOptions(mode="ssd"), ServerOptions(port=0)))
    with sending(engine, "draft", signal.SIGKILL) as sent, engine, Client(engine.address) as client:
        while "it stays off" not in caplog.text:
            assert not engine.wait(0.01)
        assert sent() == 6 and set(engine.pids) == {"target", "frontend"}
        expected = client.generate(PROMPT, msgspec.structs.replace(FEW, speculation=Speculation("ar"))).token_ids
        assert client.generate(PROMPT, FEW).token_ids == expected
        with urlopen(f"{engine.url}/health") as healthy, urlopen(f"{engine.url}/server_info") as told:
            assert healthy.status == 200 and json.load(told)["state"] == "degraded"
    assert "the draft was lost (killed by SIGKILL), it dies again and again (6 times); it stays off" in caplog.text
    one = start("LLM", {"mode": "ssd"}, {role: Kill(0.5) for role in VICTIMS})
    assert one.killed == set(VICTIMS)
    assert (one.wrong, one.token_ids) == ("", expected)


def test_a_draft_that_is_stopped_while_it_loads_is_replaced_and_not_waited_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "_STOPPED_S", LOOK_S)
    engine = Engine(resolve(EngineOptions(mode="ssd")))
    with sending(engine, "draft", signal.SIGSTOP, most=1):
        try:
            engine.start(timeout=5 * PATIENCE_S)
            assert "the draft was lost (stopped by a signal for 0.25 s), restarting it in 0.1 s" in caplog.text
            while "draft" not in engine.pids:
                assert not engine.wait(0.01)
        finally:
            engine.stop(drain=0)


def test_a_process_that_hangs_while_it_loads_ends_the_engine_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_LOAD_TIMEOUT_S", 0.0)
    engine = Engine(resolve(EngineOptions(**SMALL)))
    with pytest.raises(EngineDeadError, match=r"^the (target|frontend) process ended: not ready in 0 s$"):
        engine.start()


def test_an_interrupt_is_for_the_program_and_not_for_its_processes(capfd: pytest.CaptureFixture[str]) -> None:
    """They are in groups of their own; somebody else may send it to them all the same."""
    engine = Engine(resolve(EngineOptions(**SMALL)))
    with sending(engine, "frontend", signal.SIGINT), sending(engine, "target", signal.SIGINT) as sent, engine:
        before = engine.pids
        with Client(engine.address) as client:
            assert client.generate([[1, 2, 3]], FEW)[0].token_ids
        assert engine.pids == before and sent() == 1
    assert capfd.readouterr().err == ""
