"""What a terminal sees while weights are read, and who does not see it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ssd.models import registry
from ssd.models.checkpoint import inspect
from tests.cli.terminal import terminal
from tests.faults.engine import gone
from tests.models import tiny

ONE_TOKEN = ("--mode", "ar", "--max-tokens", "1", "--raw", "a")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tokenizer(tiny.llama(tmp_path_factory.mktemp("models") / "little", vocab_size=300))


def command(target: Path, *arguments: str) -> tuple[str, ...]:
    return "-m", "ssd.cli.main", "generate", "--target", str(target), *ONE_TOKEN, *arguments


def test_a_bar_shows_how_far_the_weights_are(target: Path) -> None:
    with terminal(*command(target)) as seen:
        seen.wait_for(r"loading little [^\n]*\d+%")
        assert seen.end() == 0
        assert not any("loading" in line for line in seen.lines()), "it goes when it is done"


def test_a_bar_shows_how_far_the_compiling_is(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the compilers; `ssd pull` compiles ahead, with the same bar."""
    begun, compiler = tmp_path / "begun", tmp_path / "my-cc"
    compiler.write_text(f"#!/bin/sh\necho $$ >> {begun}; exec sleep 100\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("SSD_CACHE", str(tmp_path))
    for asked in (command(target), ("-m", "ssd.cli.main", "pull")):
        with terminal(*asked) as seen:
            seen.wait_for(r"compiling kernels, once[^\n]*0%")
            assert seen.end("\x03") == 130
        assert all(gone(int(pid)) for pid in begun.read_text().split())
        assert [entry.name for entry in (tmp_path / "kernels").iterdir()] == [".compiling"]


def test_json_comes_without_it(target: Path) -> None:
    with terminal(*command(target, "--json")) as seen:
        assert seen.end() == 0
        assert b"token_ids" in seen.written and b"loading" not in seen.written


def test_whoever_loads_a_model_hears_how_far_it_is(tmp_path: Path) -> None:
    """After every tensor, up to all bytes."""
    heard: list[tuple[int, int]] = []
    found = inspect(tiny.llama(tmp_path, shards=True))
    registry.load(found, torch.float32, tiny.CPU, 64, progress=lambda *far: heard.append(far))
    assert heard == sorted(heard) and len(heard) == len(found.tensors)
    assert {total for _, total in heard} == {found.nbytes} == {heard[-1][0]}
