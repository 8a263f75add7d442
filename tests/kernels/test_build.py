"""Compiling the kernels: once, and without them where that cannot be done."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ssd.kernels import build
from ssd.system import interpreter
from tests.faults.engine import gone

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SSD_CACHE", str(tmp_path))
    monkeypatch.delenv("SSD_KERNELS", raising=False)
    build.library.cache_clear()
    yield tmp_path
    build.library.cache_clear()


def kept(cache: Path) -> set[str]:
    """The files and folders of compiled kernels, without the lock."""
    return {entry.name for entry in (cache / "kernels").iterdir()} - {".compiling"}


def test_it_is_compiled_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", str(logging_compiler(fresh, 'exec cc "$@" -O0')))
    first = build.library()
    assert first is not None and kept(fresh) == {first.name}
    made = first.stat().st_mtime_ns
    build.library.cache_clear()
    assert build.library() == first and first.stat().st_mtime_ns == made


def logging_compiler(folder: Path, does: str) -> Path:
    """A compiler that writes its arguments, a line a call, and then `does` something."""
    compiler = folder / "my-cc"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\n{does}\n')
    compiler.chmod(0o755)
    return compiler


_COMPILE = "import logging; from ssd.kernels import build; logging.basicConfig(); print(build.library(), flush=True)"


def compiling(compiler: Path) -> subprocess.Popen[str]:
    """Another process that needs the kernels."""
    environment = interpreter.environment() | {"CC": str(compiler)}
    command = [sys.executable, "-c", _COMPILE]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_processes_that_start_at_once_compile_each_file_once(fresh: Path) -> None:
    compiler = logging_compiler(fresh, 'exec cc "$@" -O0')
    processes = [compiling(compiler) for _ in range(3)]
    told = [process.communicate()[0] for process in processes]
    (library,) = {*told}
    assert Path(library.strip()).is_file()
    calls = (fresh / "calls").read_text().splitlines()
    files = [word for call in calls for word in call.split() if word.endswith(".c")]
    assert sorted(files) == sorted(map(str, Path(build.__file__).parent.glob("*.c")))
    assert len(calls) == len(files) + 1, "and the objects are linked once"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_compilers_end_with_the_process_that_needs_them(number: signal.Signals, fresh: Path) -> None:
    """Also the programs that a compiler has started, as `cc1`; the next process sweeps, and begins again."""
    begun = fresh / "begun"
    os.mkfifo(begun)
    compiler = logging_compiler(fresh, f"sh -c 'echo $$ > {begun}; exec sleep 100' & wait")
    process = compiling(compiler)
    pid = int(begun.read_text().split()[0])
    process.send_signal(number)
    process.communicate()
    assert gone(pid)
    assert number is not signal.SIGINT or kept(fresh) == set(), "the scratch folder is left"
    (fresh / "kernels" / "tmpold").mkdir(parents=True)
    process = compiling(logging_compiler(fresh, "exit 1"))
    assert process.communicate()[0] == "None\n" and kept(fresh) == set()


def test_compilers_that_start_while_others_are_killed_end_too() -> None:
    """As when an interrupt comes between two files."""
    ended = list[int]()

    def compile_files(start: Callable[..., subprocess.Popen[str]]) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                ended.append(start(["sleep", "20"]).wait())

    with ThreadPoolExecutor(4) as pool:
        for _ in range(50):
            with build._process_group() as start:
                compiling = [pool.submit(compile_files, start) for _ in range(4)]
                time.sleep(0.01)
            for one in compiling:
                one.result()
    assert {*ended} == {-signal.SIGKILL}


def test_processor_time_ends_a_compiler_not_the_time_that_others_take(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "_MOST_SECONDS", 1)
    monkeypatch.setenv("CC", str(logging_compiler(fresh, "while :; do :; done")))
    assert build.library() is None and kept(fresh) == set()
    assert "torch has to do without" in caplog.text


@pytest.mark.parametrize("slow", ["v3", "v4"])
def test_the_kernels_of_a_wheel_that_are_fastest_here_are_taken(
    slow: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "some.c"
    source.write_text("void sample_product(long rows, char *memory) { for (volatile int i = 0; i < TURNS; i++) {} }\n")
    for level in ("v3", "v4"):
        file, turns = tmp_path / build.file_name(level), 100_000 if level == slow else 10
        subprocess.run(["cc", f"-DTURNS={turns}", "-shared", "-fPIC", "-o", file, source], check=True)
    needs = {level: list(flags) for level, (_, flags) in build.LEVELS.items()}
    assert build.prebuilt(needs["v3"], tmp_path) == tmp_path / "cpu-v3.so", "it cannot run the other"
    found = tmp_path / f"cpu-{'v4' if slow == 'v3' else 'v3'}.so"
    assert build.prebuilt(needs["v4-vnni"], tmp_path) == found, "there are none for v4-vnni"
    note = tmp_path / "kernels" / kept(tmp_path).pop()
    note.write_text(build.file_name(slow))
    assert build.prebuilt(needs["v4"], tmp_path) == tmp_path / build.file_name(slow), "it was timed again"
    note.write_text("nonsense")
    assert build.prebuilt(needs["v4"], tmp_path) == found
    assert build.prebuilt(needs["v3"][1:], tmp_path) is None
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "cpu-v4.so").write_text("of another system")
    assert build.prebuilt(needs["v4"], foreign) is None
    assert "the packaged kernels do not load" in caplog.text
    note.write_bytes(b"\xff\xfe")
    note.chmod(0o444)
    assert build.prebuilt(needs["v4"], tmp_path) == found


def test_kernels_are_chosen_where_nothing_can_be_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source, files = tmp_path / "some.c", [tmp_path / "one.so", tmp_path / "other.so"]
    source.write_text("void sample_product(long rows, char *memory) {}\n")
    for file in files:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", file, source], check=True)
    monkeypatch.setenv("SSD_CACHE", "/proc/none")
    assert build.fastest(files) in files and "cannot be noted" in caplog.text


def test_a_package_without_kernels_has_none(tmp_path: Path) -> None:
    assert build.prebuilt(["avx2"], tmp_path) is None


def test_other_sources_make_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "some.c"
    monkeypatch.setattr(build, "_SOURCES", [source])
    found = set()
    for number in (1, 2):
        source.write_text(f"int one(void) {{ return {number}; }}\n")
        build.library.cache_clear()
        found.add(build.library())
    assert None not in found and len(found) == 2


def test_a_compiler_that_fails_is_named_with_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", str(logging_compiler(tmp_path, "echo 'no such target' >&2; exit 1")))
    with caplog.at_level(logging.WARNING):
        assert build.library() is None
    assert "my-cc" in caplog.text and "no such target" in caplog.text
    assert kept(tmp_path) == set()


def test_a_compiler_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("CC", "cc '")
    with caplog.at_level(logging.WARNING):
        assert build.library() is None
    assert "cc ' did not compile our kernels" in caplog.text and "No closing quotation" in caplog.text


def test_without_a_compiler_there_are_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    with caplog.at_level(logging.WARNING):
        assert build.library() is None
    assert "found no C compiler" in caplog.text


def test_they_can_be_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("SSD_KERNELS", "0")
    with caplog.at_level(logging.WARNING):
        assert build.library() is None
    assert caplog.text == ""
