"""A checkout that was only unpacked, without metadata of an installation, has all its parts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from ssd.config.engine import ServerConfig
from ssd.errors import UsageError
from ssd.frontend.http.app import _of_doors
from ssd.launch.options import EngineOptions
from ssd.models import registry
from ssd.speculation import backups as speculators
from ssd.system import registered

ROOT = Path(__file__).parents[2]
ASK = """
import importlib.metadata, json
importlib.metadata.entry_points = lambda **_: []
from ssd.cli.main import main
from ssd.system import registered
from ssd.models import registry
from ssd.speculation import backups as speculators
import ssd, tools.gpu_report.__main__
parsers = [registered.names(group) for group in (registered.TOOLS, registered.REASONING)]
found = [registry.families(), *parsers, speculators.names()]
family, parser = registry._entries()["qwen3"].load().__name__, registered.load(registered.TOOLS, "hermes").__name__
print(json.dumps([ssd.__file__, *found, family, parser]))
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, without = tmp_path_factory.mktemp("unpacked"), shutil.ignore_patterns("builtin", "__pycache__")
    for part in ("ssd", "tools"):
        shutil.copytree(ROOT / part, folder / part, ignore=without)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.mark.bench
def test_an_unpacked_checkout_has_its_families_parsers_and_tools(unpacked: Path) -> None:
    command = [sys.executable, "-c", ASK]
    done = subprocess.run(command, cwd=unpacked, env={"PYTHONPATH": str(unpacked)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    where, families, tools, reasoning, backups, family, parser = json.loads(done.stdout)
    assert Path(where).is_relative_to(unpacked) and (family, parser) == ("Qwen3", "Hermes")
    assert families.items() >= {name: said for name, said in registry.families().items() if said == "built in"}.items()
    own = {entry.name for entry in registered._own(registered.TOOLS) or () if registered._is_here(entry)}
    assert (
        {"llama", "mistral", "qwen2", "qwen3", "qwen3_next"} <= families.keys()
        and own <= set(tools) <= set(registered.names(registered.TOOLS))
        and own
    )
    assert set(reasoning) <= set(registered.names(registered.REASONING)) and {"ngram", "auto"} <= set(backups)
    assert set(backups) <= set(speculators.names())


OTHER = """
[project]
name = "another"
[project.entry-points."ssd.models"]
x = "y:Z"
"""


@pytest.mark.parametrize("text", [None, "[", OTHER], ids=["none", "broken", "another"])
def test_another_project_beside_the_package_is_not_read(text: str | None, tmp_path: Path, monkeypatch: Any) -> None:
    if text is not None:
        (tmp_path / "pyproject.toml").write_text(text)
    monkeypatch.setattr(registered, "_PROJECT", tmp_path / "pyproject.toml")
    assert registered._own.__wrapped__("ssd.models") is None


def test_emulation_that_is_not_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "names", lambda group: [])
    options = EngineOptions(load_format="dummy", synthetic_acceptance_length=2.0, num_speculative_tokens=4)
    with pytest.raises(UsageError, match="synthetic acceptance are not part of this installation"):
        options.synthetic()
    for name in ("runner", "model"):
        with pytest.raises(UsageError, match=r"emulated times and .* not part of this installation"):
            registered.emulation(name)


# -- parts of other packages ----------------------------------------------------------------------------------------


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a command that cannot be imported, and one that has the name of a core's."""
    about = tmp_path / "other-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        "[ssd.commands]\nbroken = other_broken:COMMANDS\nfine = other_fine:COMMANDS\n"
    )
    (tmp_path / "other_broken.py").write_text("import nothing_of_this_name\n")
    (tmp_path / "other_fine.py").write_text(
        "from ssd.frontend.http.openapi import Route\n"
        'COMMANDS = {"launch": ("other_fine:launch", "THEIRS"), "hey": ("other_fine:hey", "Says hey.")}\n'
        'routes = lambda server: [Route("GET", path, None, "") for path in ("/health", "/hey")]\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_part_that_cannot_be_loaded_is_named_and_left_out(other: Path, caplog: pytest.LogCaptureFixture) -> None:
    cause = r"broken of other \(entry points ssd.commands\) cannot be loaded: ModuleNotFoundError"
    with pytest.raises(UsageError, match=cause):
        registered.load.__wrapped__(registered.COMMANDS, "broken")
    path = os.pathsep.join([str(other), str(ROOT)])
    command = [sys.executable, "-m", "ssd.cli.main", "--help"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0 and "hey" in done.stdout and "THEIRS" not in done.stdout
    assert len(done.stderr.splitlines()) == 1 and re.search(cause, done.stderr)


def test_a_door_takes_no_path_of_the_core(other: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import other_fine

    monkeypatch.setattr(registered, "load_all", lambda group: {"ours": other_fine.routes})
    assert [route.path for route in _of_doors(ServerConfig())] == ["/hey"]


def test_a_removed_plugin_may_leave_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "_PACKAGE", tmp_path)
    for name, file in (("here", "__init__.py"), ("gone", "__pycache__/x.pyc")):
        (tmp_path / "plugins" / name / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "plugins" / name / file).touch()
    for name, present in (("here", True), ("gone", False), ("never", False)):
        entry = EntryPoint("x", f"ssd.plugins.{name}.module:X", "ssd.doors")
        assert registered._is_here(entry) is present
