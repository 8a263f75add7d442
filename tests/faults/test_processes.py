"""Real processes: whoever dies, answers stay the same and nothing stays behind (RELIABILITY 1, contract C1, C9)."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import msgspec
import pytest

from ssd.client import Client
from ssd.config.params import SamplingParams, Speculation
from ssd.config.roles import ROLES
from ssd.errors import RequestError, UsageError
from ssd.ipc.run_directory import run_directory
from ssd.launch import liveness
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.server import ServerOptions
from ssd.launch.supervisor import Engine
from ssd.system import failpoints
from tests.faults.engine import descriptors, gone, running_engine, shared_memory
from tools.faulty_draft.__main__ import Fault, disturbed, openings

PROMPT = "The capital of France is"
HOST = """
import sys
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.supervisor import Engine
engine = Engine(resolve(EngineOptions()))
engine.start()
print(engine.address, *engine.pids.values(), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One that replaces no draft for being stopped: on a busy machine a test takes longer than the 60 s of a step."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(liveness, "STEP_TIMEOUT_S", 300.0)
        with Engine(resolve(EngineOptions(), ServerOptions(port=0))) as engine:
            yield engine


def params(mode: str = "ssd", tokens: int = 96, lookahead: int = 0) -> SamplingParams:
    speculation = Speculation(mode, lookahead, (3,), "jit")  # type: ignore[arg-type]
    return SamplingParams(max_tokens=tokens, ignore_eos=True, speculation=speculation, store=False)


def is_hit(client: Client) -> bool:
    """Whether the draft is of use before 200 requests are answered: a count and no clock, as each takes a while."""
    return any(client.generate(PROMPT, params(lookahead=3)).metrics.hits for _ in range(200))


def state_after_request(engine: Engine, client: Client) -> str:
    client.generate(PROMPT, params(lookahead=3))
    with urlopen(f"{engine.url}/server_info") as answer:
        return str(json.load(answer)["draft_state"])


def test_an_engine_leaves_no_process_socket_or_memory_behind() -> None:
    gc.collect()  # what other tests have left to it
    shm, before = shared_memory(), descriptors()
    with running_engine() as engine, Client(engine.address) as client:
        pids = engine.pids
        directory = Path(engine.address.removeprefix("ipc://")).parent
        assert set(pids) == {"target", "draft", "frontend"}
        assert directory.stat().st_mode & 0o777 == 0o700
        client.generate(PROMPT, params(tokens=4))
    assert all(gone(pid) for pid in pids.values())
    assert not directory.exists()
    assert shared_memory() == shm
    assert descriptors() == before, "though the engine object is still there"
    assert engine.failure is None


def test_losing_the_draft_changes_no_token_and_the_next_one_proposes(engine: Engine) -> None:
    """Stopped in the middle of an answer, and then killed; tests/cli/test_generate.py kills it in the middle."""
    with Client(engine.address) as client:
        expected = client.generate(PROMPT, params("ar")).token_ids
        ids: list[int] = []
        for count, chunk in enumerate(client.stream(PROMPT, params())):
            if count == 5:
                draft = engine.pids["draft"]
                os.kill(draft, signal.SIGSTOP)
            ids += chunk.token_ids
        assert ids == expected
        os.kill(draft, signal.SIGKILL)
        assert gone(draft)
        assert is_hit(client) and engine.pids["draft"] != draft


def test_a_draft_that_was_stopped_is_given_up_goes_on_and_is_of_use_again(engine: Engine) -> None:
    with Client(engine.address) as client:
        assert is_hit(client)
        before, draft = openings(engine), engine.pids["draft"]
        expected = client.generate(PROMPT, params("ar")).token_ids
        os.kill(draft, signal.SIGSTOP)
        for _ in range(200):  # a count, as above
            assert client.generate(PROMPT, params(lookahead=3)).token_ids == expected
            if openings(engine) > before:
                break
        assert openings(engine) > before, "one request may be long enough for a trial, which opens it again"
        os.kill(draft, signal.SIGCONT)
        assert is_hit(client) and engine.pids["draft"] == draft
        assert any(state_after_request(engine, client) == "up" for _ in range(200)), "a first hit may be of the trial"


@pytest.mark.thorough
@pytest.mark.parametrize("noise", [Fault(hog=0.3), Fault(stopped=0.05, runs=0.2)], ids=["busy core", "pauses"])
def test_a_draft_that_loses_its_core_for_moments_is_kept(engine: Engine, noise: Fault) -> None:
    with Client(engine.address) as client, disturbed(engine, noise) as begin:
        expected = client.generate(PROMPT, params("ar")).token_ids
        assert is_hit(client)
        before = openings(engine)
        begin.set()
        for _ in range(3):
            assert client.generate(PROMPT, params(lookahead=3)).token_ids == expected
        assert openings(engine) == before


def test_after_the_death_of_the_target_a_new_pair_gives_the_same_tokens() -> None:
    shm = shared_memory()
    with running_engine() as engine, Client(engine.address) as client:
        expected = client.generate(PROMPT, params("ar")).token_ids
        before = engine.pids
        with pytest.raises(RequestError) as caught:
            for count, _ in enumerate(client.stream(PROMPT, params(tokens=500))):
                if count == 3:
                    os.kill(before["target"], signal.SIGKILL)
        assert caught.value.code == "engine_restarted"
        deadline = time.monotonic() + 120
        hits = 0
        while not hits:
            assert time.monotonic() < deadline, "the new pair does not speculate"
            try:
                completion = client.generate(PROMPT, params())
            except RequestError as error:
                assert error.code == "restarting"
                time.sleep(0.05)
                continue
            assert completion.token_ids == expected
            hits = completion.metrics.hits
        assert engine.pids["frontend"] == before["frontend"]
        assert not set(engine.pids.values()) & {before["target"], before["draft"]}
    assert shared_memory() == shm


def test_a_request_that_a_hanging_target_had_not_begun_is_answered_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(liveness, "STEP_TIMEOUT_S", 3.0)
    monkeypatch.setenv(failpoints.VARIABLE, "target.submit=hang@0.3")
    engine = Engine(msgspec.structs.replace(resolve(EngineOptions(mode="ar")), failpoints=True))
    with engine, Client(engine.address) as client:
        monkeypatch.delenv(failpoints.VARIABLE)  # the next target is sound
        target = engine.pids["target"]
        texts = set()
        while engine.pids.get("target") == target:
            texts.add(client.generate(PROMPT, params("ar", tokens=8)).text)
        assert len(texts) == 1, "before the hang, and over it"


@pytest.mark.parametrize(
    "stopped",
    [0, *(pytest.param(number, marks=pytest.mark.thorough) for number in (1, 2)), None],
    ids=[*ROLES, "none, but the program has forked"],
)
def test_children_end_with_a_killed_supervisor(stopped: int | None) -> None:
    """Those that run, and one that is stopped. What the program has forked, as `multiprocessing` does, has its
    descriptors, and may live on."""
    fork = "import os, time\nforked = os.fork() or time.sleep(600)" if stopped is None else "forked = 0"
    host = subprocess.Popen(
        [sys.executable, "-c", HOST.replace("print(", f"{fork}\nprint(forked, ")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert host.stdout is not None and host.stdin is not None
    forked, address, *pids = host.stdout.readline().split()
    if stopped is not None:
        os.kill(int(pids[stopped]), signal.SIGSTOP)
    host.kill()
    host.wait()
    try:
        assert all(gone(int(pid)) for pid in pids)
        assert not Path(address.removeprefix("ipc://")).parent.exists()
    finally:
        if forked != "0":
            os.kill(int(forked), signal.SIGKILL)
        host.stdin.close()
        host.stdout.close()


def test_children_end_with_a_supervisor_killed_while_they_load() -> None:
    """Also before anyone is ready, and when the whole process group is killed, as a service manager does."""
    script = HOST.replace("engine.start()", "import threading; threading.Thread(target=engine.start).start()").replace(
        "print(", "\nwhile len(engine.pids) < 3: pass\nprint("
    )
    host = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert host.stdout is not None
    address, *pids = host.stdout.readline().split()
    assert len(pids) == 3
    os.killpg(host.pid, signal.SIGKILL)
    host.wait()
    host.stdout.close()
    assert all(gone(int(pid)) for pid in pids)
    assert not Path(address.removeprefix("ipc://")).parent.exists()


def test_a_long_tmpdir_does_not_break_socket_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with run_directory() as directory:
        assert len(f"{directory}/supervisor.sock") < 107
        assert directory.stat().st_mode & 0o777 == 0o700


def test_a_child_that_cannot_start_is_the_message(tmp_path: Path) -> None:
    config = resolve(EngineOptions())
    broken = tmp_path / "model"
    broken.mkdir()
    source = Path(config.draft or "")
    for file in source.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    text = (broken / "config.json").read_text().replace('"num_hidden_layers": 8', '"num_hidden_layers": 9')
    (broken / "config.json").write_text(text)
    engine = Engine(msgspec.structs.replace(config, draft=str(broken)))
    with pytest.raises(UsageError, match=r"layers\.8\..* is missing"):
        engine.start()
