"""A family from another package: installed as users install it, listed, checked, and generating through all processes.

The package is `examples/plugin`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ssd.execution.batch import Row
from ssd.models import registry
from tests.models import tiny

SOURCE = Path(__file__).parents[2] / "examples" / "plugin"
KNOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias, tied": {"use_qkv_bias": True, "tie_word_embeddings": True},
    "side by side": {"use_parallel_residual": True, "partial_rotary_factor": 0.5, "layer_norm_eps": 0.1},
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plugin installed. Built from a copy, since a build leaves files beside its source."""
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(SOURCE, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    flags = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check")
    command = (sys.executable, "-m", "pip", "install", *flags, "--target", str(folder / "site"), str(folder / "source"))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "site"


def ssd(site: Path, *arguments: str) -> str:
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = (sys.executable, "-m", "ssd.cli.main", *arguments)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_listed_with_where_it_comes_from(site: Path) -> None:
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in ssd(site, "models").splitlines()]
    assert ["stablelm", "ssd-stablelm", ""] in rows
    assert ["llama", "built in", "llama"] in rows


@pytest.mark.parametrize("knobs", KNOBS)
def test_its_logits_are_those_of_transformers(
    knobs: str, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(site)
    assert registry.families()["stablelm"] == "ssd-stablelm"
    directory, text = tiny.model("stablelm", tmp_path, **KNOBS[knobs]), tiny.token_ids(60, 0)
    runner, expected = tiny.runner(directory), tiny.oracle_logits(tiny.oracle(directory), text)
    for start, stop in ((0, 33), (33, 34), (34, 60)):
        logits = runner.forward([Row(text[start:stop], start, range(16), stop - start)])
        assert (logits - expected[start:stop]).abs().max() <= 1e-4


def test_a_plugin_does_not_replace_a_built_in_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = tmp_path / "other-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[ssd.models]\nllama = other:Llama\nnew = other:New\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert registry.families().items() >= {"llama": "built in", "new": "other"}.items()


@pytest.mark.thorough
def test_it_generates_as_target_and_as_draft(site: Path, tmp_path: Path) -> None:
    target = tiny.tokenizer(tiny.model("stablelm", tmp_path / "target", vocab_size=300))
    draft = tiny.tokenizer(tiny.noisy_copy(target, tmp_path / "draft", noise=0.002))
    models = ("--target", str(target), "--draft", str(draft), "--dtype", "float32")
    asked = ("generate", "A tiny random checkpoint", "--raw", "--json", "--max-tokens", "30", "--ignore-eos")
    plain = json.loads(ssd(site, *asked, *models, "--mode", "ar"))
    ours = json.loads(ssd(site, *asked, *models, "--mode", "ssd", "-k", "3"))
    assert len(ours["token_ids"]) == 30 and ours["token_ids"] == plain["token_ids"]
    assert ours["metrics"]["mode"] == "ssd" and ours["metrics"]["mean_acceptance_length"] > 1
