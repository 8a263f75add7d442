"""`ssd top` as a process, on a terminal and without one, with the mock engine and with scripted figures."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from ssd.client import Client
from ssd.config.params import SamplingParams
from ssd.errors import UsageError
from ssd.kernels import build
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.server import ServerOptions
from ssd.launch.supervisor import Engine
from tests.cli.launched import running as launched
from tests.cli.terminal import PATIENCE_S, Terminal, terminal
from tests.faults.engine import running_engine
from tests.mock import ROUND_VARIABLE
from tests.models import tiny
from tools.draw_top import draw

TOP = ["-m", "ssd.cli.main", "top"]
LEFT, SHOWN = r"\x1b\[\?1049l", r"\x1b\[\?25h"


@contextmanager
def runtime_directory() -> Iterator[Path]:
    """Where no other engine runs."""
    directory = Path(tempfile.mkdtemp(prefix="ssd-test-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_RUNTIME_DIR", str(directory))
        environment.setenv(ROUND_VARIABLE, "20")
        yield directory
    shutil.rmtree(directory)


@pytest.fixture
def runtime() -> Iterator[Path]:
    with runtime_directory() as directory:
        yield directory


@pytest.fixture
def engine(runtime: Path) -> Iterator[Engine]:
    with running_engine(load_format="mock", max_model_len=8000) as engine:
        yield engine


@pytest.fixture(scope="module")
def busy_engine() -> Iterator[tuple[Path, Engine]]:
    """One request after the other, and the only engine in its directory."""
    end = threading.Event()

    def ask() -> None:
        with Client(engine.address) as client:
            while not end.is_set():
                client.generate([[1, 2, 3]], SamplingParams(max_tokens=20, ignore_eos=True))

    with runtime_directory() as directory, running_engine(load_format="mock", max_model_len=8000) as engine:
        thread = threading.Thread(target=ask)
        thread.start()
        yield directory, engine
        end.set()
        thread.join()


@pytest.fixture
def busy(busy_engine: tuple[Path, Engine], monkeypatch: pytest.MonkeyPatch) -> Engine:
    directory, engine = busy_engine
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    return engine


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    every = {**os.environ, **environment}
    return subprocess.run([sys.executable, *TOP, *arguments], capture_output=True, text=True, env=every)


def press(window: Terminal, key: str, pattern: str) -> None:
    window.mark = len(window.written)
    window.type(key)
    window.wait_for(pattern)


def restored(window: Terminal, before: list[object]) -> bool:
    """Whether the terminal is as it was: the normal screen, a cursor, keys that are lines again."""
    return all(re.search(part.encode(), window.written) for part in (LEFT, SHOWN)) and window.settings() == before


# -- on a terminal --------------------------------------------------------------------------------------------------


@pytest.mark.mock
def test_a_running_engine_at_a_glance(busy: Engine) -> None:
    with terminal(*TOP, "--interval", "0.2") as window:
        before = window.settings()
        window.wait_for("tok/s now")
        window.wait_for("verify")
        window.resize(120, 40)
        window.wait_for("processes")
        window.wait_for("acceptance length")
        window.wait_for("last requests")
        window.wait_for("length +3 +20")  # the requests end at twenty tokens
        shown = "\n".join(window.screen(120, 40))
        assert re.search("supervisor +UP", shown) and "target" in shown and "frontend" in shown
        assert "VVVV" in shown
        assert window.settings() != before
        assert window.end("q") == 0
        assert restored(window, before)


@pytest.mark.mock
def test_keys(busy: Engine) -> None:
    with terminal(*TOP) as window:
        window.wait_for("tok/s now")
        press(window, "h", "leave .* overview")
        press(window, "2", "what holds it up")
        press(window, "3", "last requests")
        press(window, "p", "paused")
        press(window, "p", r"ssd top  [^p]*\n")
        press(window, "+", "tok")
        press(window, "-", "tok")
        press(window, "1", "pipeline")
        assert window.end("q") == 0


def test_a_pause_holds_the_whole_picture() -> None:
    """The pipeline as well, whatever is asked of it then."""
    with terminal(*TOP, "--demo", "--interval", "0.1") as window:
        window.wait_for("tok/s now")
        press(window, "2", "what holds it up.*requests")
        press(window, "p", "paused.*requests")
        before = window.screen()
        for key in "+-+":
            press(window, key, r"ssd top .*3 requests")
        assert window.screen() == before and any("VVVV" in line for line in before)
        assert window.end("q") == 0


def test_help_fits_into_a_terminal_of_80_columns() -> None:
    with terminal(*TOP, "--demo") as window:
        window.wait_for("tok/s now")
        press(window, "h", r"beyond 9\..*3 requests")
        shown = "\n".join(window.screen())
        assert all(f"{key}  " in shown for key in "qp+-123h")
        assert window.end("q") == 0


def test_it_fits_into_any_terminal() -> None:
    with terminal(*TOP, "--demo", "--interval", "0.1") as window:
        window.wait_for("tok/s now")
        for size in ((200, 60), (60, 15), (40, 10), (24, 5), (10, 2), (1, 1)):
            window.resize(*size)
            window.mark = len(window.written)
            window.wait_for(r"\x1b\[H.*\x1b\[H")  # two more pictures
            window.resize(80, 24)
            window.wait_for("pipeline, shares")
        assert window.end("q") == 0


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGHUP, 143, marks=pytest.mark.thorough),
        pytest.param(signal.SIGQUIT, 143, marks=pytest.mark.thorough),
    ],
)
def test_the_terminal_is_given_back_whatever_ends_it(number: signal.Signals, code: int) -> None:
    with terminal(*TOP, "--demo") as window:
        before = window.settings()
        window.wait_for("tok/s now")
        window.process.send_signal(number)
        assert window.end() == code
        assert restored(window, before)


def test_control_c_is_a_key_of_the_terminal() -> None:
    with terminal(*TOP, "--demo") as window:
        window.wait_for("tok/s now")
        assert window.end("\x03") == 130


def test_the_terminal_is_given_back_after_an_error() -> None:
    script = "from rich.console import Console; from ssd.plugins.monitor.top import FullScreen\n"
    script += "with FullScreen(Console()) as screen: screen.show('here'); 1 / 0"
    with terminal("-c", script) as window:
        before = window.settings()
        assert window.end() == 1
        assert restored(window, before)
        window.wait_for("ZeroDivisionError")


def test_control_z_gives_the_terminal_back_until_it_goes_on() -> None:
    with terminal(*TOP, "--demo") as window:
        before = window.settings()
        window.wait_for("tok/s now")
        window.type("\x1a")
        window.wait_for(LEFT)
        deadline = time.monotonic() + PATIENCE_S
        stat = Path(f"/proc/{window.process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert window.settings() == before
        window.process.send_signal(signal.SIGCONT)
        window.wait_for("tok/s now")
        assert window.end("q") == 0
        assert restored(window, before)


@pytest.mark.mock
def test_an_engine_that_goes_is_waited_for_and_the_next_one_followed(runtime: Path, engine: Engine) -> None:
    with terminal(*TOP, "--interval", "0.1") as window:
        window.wait_for("tok/s now")
        engine.stop(drain=0)
        window.wait_for("the engine is gone")
        with running_engine(load_format="mock", max_num_seqs=3):
            window.mark = len(window.written)
            window.wait_for(r"ssd top  [^y]*ready")
            window.wait_for("tok/s now")
            assert "gone" not in window.screen()[0]
        assert window.end("q") == 0


# -- without a terminal ---------------------------------------------------------------------------------------------


FIRST = r"\d\d:\d\d:\d\d \d+\.\d tok/s, 0 running"


@pytest.mark.mock
def test_a_line_every_interval_also_when_the_engine_goes(engine: Engine) -> None:
    """As text, and as JSON."""
    command = [sys.executable, *TOP, "--interval", "0.1", "--address", engine.address]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **streams) as words, subprocess.Popen([*command, "--json"], **streams) as objects:
        assert words.stdout is not None and objects.stdout is not None
        assert re.match(FIRST, words.stdout.readline())
        assert json.loads(objects.stdout.readline())["state"] == "ready"
        engine.stop(drain=0)
        assert any("the engine is gone" in line for line in words.stdout)
        assert any(json.loads(line)["state"] == "gone" for line in objects.stdout)
        for process in (words, objects):
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 130


@pytest.mark.mock
def test_one_picture_or_one_object(busy: Engine) -> None:
    done = run("--once")
    assert done.returncode == 0 and "pipeline" in done.stdout and "\x1b" not in done.stdout
    done = run("--once", "--json")
    found = json.loads(done.stdout)
    assert found["tokens_per_second"] > 0
    assert found["pipeline"]["shares"]["target"]["verify"] > 0.5
    assert {process["role"]: process["state"] for process in found["processes"]}["target"] == "UP"
    assert sum(found["speculating"]["misses"].values()) <= found["speculating"]["rounds"]


@pytest.mark.mock
def test_no_engine_or_several_are_said(engine: Engine) -> None:
    with launched("--port", "0") as (process, said):
        done = run("--once")
        assert done.returncode == 2
        heading, *lines = done.stderr.splitlines()
        assert heading == "error: several engines are running; choose one with --address:"
        assert sorted(lines) == sorted(
            [
                f"{engine.address}  smollm2, no HTTP, pid {os.getpid()}",
                f"{said['ready']}  small, {said['http']}, pid {process.pid}",
            ]
        )
    engine.stop(drain=0)
    done = run("--once")
    assert done.returncode == 2 and done.stderr.startswith("error: no engine is running")


@pytest.mark.mock
def test_an_engine_here_is_known_by_its_url_port_and_pid(runtime: Path) -> None:
    def address(of: str) -> str:
        with Client(of) as client:
            return client.address

    with running_engine(load_format="mock"), launched("--port", "0") as (process, said):
        port, ready = said["http"].rpartition(":")[2], said["ready"]
        for name in (ready, said["http"], f"{said['http']}/v1", f"localhost:{port}", f"0.0.0.0:{port}", process.pid):
            assert address(str(name)) == ready
        assert json.loads(run("--once", "--json", "--address", said["http"]).stdout)["state"] == "ready"
        command = [sys.executable, "-m", "ssd.cli.main", "trace", "--address", str(process.pid), "--output"]
        done = subprocess.run([*command, str(runtime / "trace.json")], capture_output=True, text=True)
        assert "nothing to write" in done.stderr or done.returncode == 0
        for wrong in ("http://localhost:1", f"http://192.0.2.1:{port}", "https://example.org", "1", "localhost:99999"):
            with pytest.raises(UsageError, match=f"no engine .* at {wrong}; .*{said['http']} .pid {process.pid}"):
                address(wrong)
        assert run("--once", "--address", "1").returncode == 2


@pytest.mark.parametrize("kernels", [True, False])
def test_an_engine_without_kernels_says_so(
    kernels: bool, runtime: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At every start, in its metrics, and to who watches it."""
    build.library.cache_clear()
    if not kernels:
        monkeypatch.setenv("SSD_KERNELS", "0")
    config = resolve(EngineOptions(target=str(tiny.llama(runtime / "tiny")), mode="ar"), ServerOptions(port=0))
    for _ in range(1 if kernels else 2):
        with Engine(config) as engine:
            assert ("without compiled kernels" in caplog.text) is not kernels
            caplog.clear()
            with urlopen(f"{engine.url}/metrics") as answer:
                assert f'ssd:compiled_kernels{{model_name="tiny"}} {kernels:.1f}' in answer.read().decode()
            said = json.loads(run("--once", "--json").stdout)["stalls"]
            assert any("no compiled kernels" in line for line in said) is not kernels
    build.library.cache_clear()


def test_the_demo_needs_no_engine_and_no_colour_is_used_where_none_is_wanted(tmp_path: Path) -> None:
    assert "\x1b[" not in run("--demo", "--once").stdout
    draw(file := tmp_path / "top.svg")
    assert file.read_text().startswith("<svg")


def test_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with terminal(*TOP, "--demo") as window:
        window.wait_for("pipeline, shares")
        assert window.end("q") == 0
        assert not re.search(rb"\x1b\[[0-9;]*(3|4|9|10)[0-7][;m]", window.written)
