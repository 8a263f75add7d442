"""Wheel and sdist: what they hold, and that what they install runs from another folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import zipfile
from email import message_from_string
from email.message import Message
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("pyproject.toml", "setup.py", "README.md", "LICENSE")


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """The output of a command that must succeed. It knows no `ssd` but an installed one."""
    environment["PYTHONPATH"] = ""
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """The sdist, the wheel that is built from it, and the commit: of a copy of this tree, which stays as it is."""
    folder = tmp_path_factory.mktemp("distributions")
    tree, out = folder / "tree", folder / "dist"
    shutil.copytree(ROOT / "ssd", tree / "ssd", ignore=shutil.ignore_patterns("__pycache__", "COMMIT"))
    for name in SHIPPED:
        shutil.copy(ROOT / name, tree / name)
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false")
    run(*git, "init", "-q", cwd=tree)
    run(*git, "add", "-A", cwd=tree)
    run(*git, "commit", "-q", "-m", "All", cwd=tree)
    commit = run(*git, "rev-parse", "--short=10", "HEAD", cwd=tree).strip()
    build = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
    run(sys.executable, "-c", build, "build_sdist", out, cwd=tree)
    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    run(sys.executable, "-c", build, "build_wheel", out, cwd=folder / sdist.name.removesuffix(".tar.gz"))
    (wheel,) = out.glob("*.whl")
    return sdist, wheel, commit


def needed_by(metadata: Message) -> dict[str, Distribution]:
    """The distributions that pip would install beside one, by name, without its extras: those of this environment."""
    found: dict[str, Distribution] = {}
    waiting = metadata.get_all("Requires-Dist", [])
    while waiting:
        requirement = Requirement(waiting.pop())
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            one = distribution(requirement.name)
            if one.name not in found:
                found[one.name] = one
                waiting += one.requires or []
    return found


@pytest.fixture(scope="module")
def installed(made: tuple[Path, Path, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`ssd` in a new environment, with what its wheel requires and nothing else: linked from this one."""
    environment = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment)
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-qI", "--no-deps", made[1], cwd=environment)
    (site,) = environment.glob("lib/python*/site-packages")
    (metadata,) = site.glob("ssd_engine-*.dist-info/METADATA")
    for one in needed_by(message_from_string(metadata.read_text())).values():
        for name in {file.parts[0] for file in one.files or () if file.parts[0] != ".."} - {"__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(Path(str(one.locate_file(name))))
    return environment / "bin" / "ssd"


def test_both_hold_all_that_is_needed(made: tuple[Path, Path, str]) -> None:
    sdist, wheel, commit = made
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {*archive.namelist()}
        assert archive.read("ssd/COMMIT").decode().strip() == commit
        (metadata,) = (name for name in in_wheel if name.endswith(".dist-info/METADATA"))
        described = archive.read(metadata).decode()
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "ssd"], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    needed = {"ssd/COMMIT", *(name for name in tracked if (ROOT / name).exists())}
    assert needed - in_wheel == needed - in_sdist == set()
    assert {"ssd/py.typed", "ssd/kernels/decoder.c", "ssd/kernels/simd.h"} <= needed
    assert any(name.startswith("ssd/models/builtin/") and name.endswith(".safetensors") for name in needed)
    assert not [name for name in in_wheel if not name.startswith(("ssd/", "ssd_engine-"))]
    assert {*SHIPPED} <= in_sdist
    assert wheel.name.startswith("ssd_engine-") and wheel.name.endswith("-py3-none-any.whl")
    assert "Name: ssd-engine\n" in described and "speculative speculative decoding" in described.partition("\n\n")[2]
    assert all(f"Python :: 3.{minor}\n" in described for minor in (11, 12, 13))


def test_the_version_names_the_commit(made: tuple[Path, Path, str], installed: Path, tmp_path: Path) -> None:
    assert re.fullmatch(rf"ssd \d+\.\d+\.\d+ \({made[2]}\)\n", run(installed, "--version", cwd=tmp_path))


@pytest.mark.bench
@pytest.mark.parametrize("compiler", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_it_answers_from_another_folder(compiler: bool, installed: Path, tmp_path: Path) -> None:
    changed = {} if compiler else {"PATH": "/nowhere", "CC": ""}
    size = ("--prompts", "1", "--tokens", "4", "--modes", "ar,ssd")
    said = run(installed, "bench", "latency", *size, cwd=tmp_path, **changed)
    assert said.count(" 1/1 ") == 2  # answers with the ids of ar
    assert ("found no C compiler" in said and "apt-get install gcc" in said) is not compiler


@pytest.mark.thorough
def test_it_serves_and_obeys_a_schema_with_what_it_requires(installed: Path, tmp_path: Path) -> None:
    """Uvicorn, llguidance and the like come with the wheel, not with an extra."""
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
    asked = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Red or blue?"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": schema}},
    }
    server = subprocess.Popen(
        [installed, "serve", "smollm2", "--port", "0"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        (address,) = re.findall(r"http: (\S+)", server.stdout.readline())
        request = urllib.request.Request(
            f"{address}/v1/chat/completions", json.dumps(asked).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=100) as answer:
            (choice,) = json.load(answer)["choices"]
    finally:
        server.terminate()
        assert server.wait(60) in (0, 143)
    assert json.loads(choice["message"]["content"])["colour"] in ("red", "blue")
