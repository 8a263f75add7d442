"""Compiling the kernels: once, and without them where that cannot be done."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssd.kernels import build

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SSD_CACHE", str(tmp_path))
    monkeypatch.delenv("SSD_KERNELS", raising=False)
    build.library.cache_clear()
    yield tmp_path
    build.library.cache_clear()


def test_it_is_compiled_once(fresh: Path) -> None:
    first = build.library()
    assert first is not None and list((fresh / "kernels").iterdir()) == [first]
    made = first.stat().st_mtime_ns
    build.library.cache_clear()
    assert build.library() == first and first.stat().st_mtime_ns == made


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
    (note,) = (tmp_path / "kernels").iterdir()
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
    compiler = tmp_path / "my-cc"
    compiler.write_text(f"#!{sys.executable}\nraise SystemExit('no such target')\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with caplog.at_level(logging.WARNING):
        assert build.library() is None
    assert "my-cc" in caplog.text and "no such target" in caplog.text
    assert list((tmp_path / "kernels").iterdir()) == []


def test_a_compiler_whose_name_is_no_command_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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
