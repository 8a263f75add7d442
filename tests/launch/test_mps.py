"""CUDA's MPS by a stand-in for its control program: whether it runs, what people are told, what the draft gets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from ssd.config.engine import EngineConfig
from ssd.errors import UsageError
from ssd.ipc.process import Start
from ssd.launch import mps
from ssd.launch.children import ChildProcess
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.supervisor import Engine
from tests.scripted_engine import SMALL

# What the program does with a daemon's pipes there, and without.
STUB = """#!/bin/sh
alive="${CUDA_MPS_PIPE_DIRECTORY:-/nowhere}/alive"
[ "$1" = -d ] && exec touch "$alive"
read command
if [ ! -e "$alive" ]; then
    echo 'Cannot find MPS control daemon process' >&2
    exit 1
fi
case "$command" in
    get_server_list) exit 0 ;;
    "quit -t 5") rm "$alive"; echo "$alive" >> "$(dirname "$0")/quit" ;;
    *) exit 2 ;;
esac
"""
PERCENTAGE, PRIORITY = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_CLIENT_PRIORITY"


@pytest.fixture(autouse=True)
def pipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The daemon's directory, with pipes that one who was killed has left."""
    found = tmp_path / "a pipe directory"
    found.mkdir()
    (found / "control").touch()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(found))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    for name in (PERCENTAGE, PRIORITY):
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.fixture
def program(tmp_path: Path) -> Path:
    found = tmp_path / "bin" / "nvidia-cuda-mps-control"
    found.parent.mkdir()
    found.write_text(STUB)
    found.chmod(0o755)
    return found


def test_a_daemon_that_answers_runs(program: Path, pipes: Path) -> None:
    (pipes / "alive").touch()
    assert mps.state() == "running"


def test_pipes_of_a_daemon_that_is_gone_are_not_a_daemon(program: Path) -> None:
    assert mps.state() == "stopped"


@pytest.mark.parametrize("text", ["#!/bin/sh\nexec sleep 60\n", "no program"])
def test_a_silent_program_is_not_waited_for(text: str, program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program.write_text(text)
    monkeypatch.setattr(mps, "_TIMEOUT_S", 0.1)
    assert mps.state() == "stopped"


def test_without_the_program_the_pipes_tell(pipes: Path) -> None:
    assert mps.state() == "running"
    (pipes / "control").unlink()
    assert mps.state() == "missing"


def test_people_are_told_the_command(program: Path, pipes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, help = "nvidia-cuda-mps-control -d", ": give --mps, or start it: "
    assert mps.advice("stopped").endswith(f"{help}CUDA_MPS_PIPE_DIRECTORY='{pipes}' {command}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY")
    assert mps.advice("stopped").endswith(help + command)
    assert "not installed" in mps.advice("missing")


def test_an_engines_own_daemon_ends_with_it(program: Path) -> None:
    with mps.service() as where:
        own = Path(where["CUDA_MPS_PIPE_DIRECTORY"])
        assert (own / "alive").exists() and where["CUDA_MPS_LOG_DIRECTORY"] == str(own)
    assert (program.parent / "quit").read_text() == f"{own}/alive\n" and not own.exists()


def test_it_ends_with_a_killed_engine_too(program: Path) -> None:
    code = "import os, signal; from ssd.launch import mps\nwith mps.service(): os.kill(os.getpid(), signal.SIGKILL)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    ended, deadline = program.parent / "quit", time.monotonic() + 30
    while not (ended.exists() and ended.read_text()) or Path(ended.read_text().strip()).parent.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_daemon_that_does_not_start_is_told_with_its_words(program: Path) -> None:
    program.write_text("#!/bin/sh\necho no devices >&2\nexit 3\n")
    with (
        pytest.raises(UsageError, match=r"--mps: .*nvidia-cuda-mps-control.* exit status 3.*: no devices"),
        mps.service(),
    ):
        pass
    program.unlink()
    with pytest.raises(UsageError, match="--mps needs nvidia-cuda-mps-control, which is not installed"), mps.service():
        pass


def test_all_processes_of_an_engine_find_its_daemon(program: Path) -> None:
    config = replace(resolve(EngineOptions(**SMALL)), mps=True)
    with Engine(config) as engine:
        found = set()
        for pid in engine.pids.values():
            names = Path(f"/proc/{pid}/environ").read_text().split("\0")
            found |= {name for name in names if name.startswith("CUDA_MPS_PIPE_DIRECTORY=")}
        (where,) = found
    alive = where.partition("=")[2] + "/alive"
    assert (program.parent / "quit").read_text() == alive + "\n"


def test_a_daemon_that_runs_already_is_used_and_left_running(program: Path, pipes: Path) -> None:
    (pipes / "alive").touch()
    with Engine(replace(resolve(EngineOptions(**SMALL)), mps=True)):
        pass
    assert not (program.parent / "quit").exists() and (pipes / "alive").exists()


@pytest.mark.parametrize(
    ("role", "device", "draft_device", "given", "expected"),
    [
        ("draft", "cuda", "cuda:0", {}, (str(mps.DRAFT_SHARE), "")),
        ("draft", "cuda:1", "cuda:2", {}, (str(mps.DRAFT_SHARE), "")),
        ("draft", "cuda:0", "cuda:0", {PERCENTAGE: "50"}, ("50", "")),
        ("draft", "cuda:0", "cuda:0", {PRIORITY: "1"}, (str(mps.DRAFT_SHARE), "1")),
        ("target", "cuda", "cuda:0", {}, ("", "")),
        ("draft", "cuda", "cuda:2", {}, ("", "")),
        ("draft", "cuda", "cpu", {}, ("", "")),
        ("draft", "cpu", "cuda", {}, ("", "")),
    ],
)
def test_a_draft_beside_the_target_has_a_small_share(
    role: str,
    device: str,
    draft_device: str,
    given: dict[str, str],
    expected: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the process itself has it; what a user has set stays. And it counts GPUs as `ssd.config.gpus` does."""
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = tmp_path / "found"
    values = f"tuple(os.environ.get(name, '') for name in {(PERCENTAGE, PRIORITY, 'CUDA_DEVICE_ORDER')})"
    program = f"import os\ndef main(child):\n    open({str(found)!r}, 'w').write(repr({values}))\n"
    (tmp_path / "shows_environment.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = EngineConfig(
        target="t", draft="d", device=device, draft_device=draft_device, tensor_parallel_size=2, max_model_len=256
    )
    process = ChildProcess("shows_environment", Start(role, 1, "", config, (), -1, -1))
    assert process.wait() == 0
    assert found.read_text() == repr((*expected, "PCI_BUS_ID"))
