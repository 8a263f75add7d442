"""The working directory is data: what lies there is not imported by any process that is started."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

import ssd
from ssd import SamplingParams
from ssd.client import Client
from ssd.errors import UsageError
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.supervisor import Engine
from ssd.system.interpreter import child_command, environment
from ssd.system.wheels import download_wheel
from tests.cli.launched import SMALL_MODEL
from tests.models import tiny
from tests.scripted_engine import PATIENCE_S, SMALL

MODULES = ("uvloop", "torch", "msgspec", "jinja2", "zmq", "json", "sitecustomize")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, and modules that leave a file when they are imported; the working directory."""
    folder = tiny.tokenizer(tiny.llama(tmp_path / "downloaded", vocab_size=300))
    code = f"open({str(tmp_path / 'imported')!r}, 'a').write(__name__)"
    for name in MODULES:
        (folder / f"{name}.py").write_text(code)
    for name in ("ssd", "pip"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(code)
    monkeypatch.chdir(folder)
    return folder


def imported(folder: Path) -> bool:
    return (folder.parent / "imported").exists()


def test_an_engine_imports_nothing_from_the_working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ":")  # the working directory, twice
    with Engine(resolve(EngineOptions(**SMALL))) as engine, Client(engine.address) as client:
        (completion,) = client.generate(["a"], SamplingParams(max_tokens=3))
    assert len(completion.token_ids) == 3
    assert not imported(folder)


def test_a_model_folder_can_be_the_working_directory(folder: Path) -> None:
    arguments = ("generate", "hi", "--target", ".", "--mode", "ar", "--max-tokens", "2", "--raw", "--json")
    done = subprocess.run(child_command("ssd.cli.main", *arguments), capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 2
    assert not imported(folder)


def test_pip_is_not_taken_from_the_working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UsageError, match="pip cannot download nothing==1"):
        download_wheel("nothing==1", folder.parent)
    assert not imported(folder)


def test_children_run_the_ssd_of_their_parent(tmp_path: Path) -> None:
    """A checkout that is not installed, run from its root; another one is installed."""
    ours = Path(ssd.__file__).parent
    shutil.copytree(ours, tmp_path / "ssd", ignore=shutil.ignore_patterns("__pycache__", "builtin"))
    file = tmp_path / "ssd" / "__init__.py"
    file.write_text(file.read_text().replace(ssd.__version__, "0.0.0.checkout"))
    command = [sys.executable, "-m", "ssd.cli.main", "launch", *SMALL_MODEL, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().split()[1]
            with urllib.request.urlopen(f"{url}/version", timeout=PATIENCE_S) as answer:
                assert json.load(answer)["version"] == "0.0.0.checkout"
        finally:
            process.terminate()
            process.communicate(timeout=PATIENCE_S)
