"""Names to folders. No test leaves this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from ssd.errors import UsageError
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.models import hub
from tests.models import tiny

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def empty_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches of our own and of the hub, and a hub that is out of reach."""
    import huggingface_hub.constants as constants

    monkeypatch.setenv("SSD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_the_draft_comes_with_the_package() -> None:
    directory = hub.resolve("smollm2-draft")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in directory.iterdir()}


def test_a_builtin_model_not_pulled_says_how(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="run `ssd pull smollm2`"):
        hub.resolve("smollm2")
    folder = tmp_path / "cache" / "models" / "smollm2"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert hub.resolve("smollm2") == hub.ensure("smollm2") == folder


def test_a_folder_must_be_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{tmp_path} is not a checkpoint"):
        hub.resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert hub.resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["smollm3", "./missing", "/missing/folder", "a/b/c", "", "../x", "a/../b"])
def test_an_unknown_name_lists_the_builtin_ones(name: str) -> None:
    with pytest.raises(UsageError, match=r"no model .*smollm2, smollm2-draft"):
        hub.resolve(name)


def test_a_hub_out_of_reach_is_told_in_one_line() -> None:
    with pytest.raises(UsageError, match=r"cannot get 'org/name' from the hub: .") as caught:
        hub.resolve("org/name")
    assert "\n" not in str(caught.value)


def test_a_cached_hub_model_needs_no_hub(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    assert hub.resolve("org/name") == snapshot
    assert hub.resolve("org/name", revision=COMMIT) == snapshot
    with pytest.raises(UsageError, match="cannot get 'org/name'"):
        hub.resolve("org/name", revision="other")


def test_target_and_drafts_have_revisions_of_their_own(tmp_path: Path) -> None:
    """One for each draft, in their order; an empty one is none."""
    for name, commit in (("target", COMMIT), ("small", COMMIT[::-1]), ("large", COMMIT)):
        snapshot = tmp_path / "hub" / f"models--org--{name}" / "snapshots" / commit
        tiny.llama(snapshot)
    folder = str(tmp_path / "hub" / "models--org--large" / "snapshots" / COMMIT)
    asked = EngineOptions(target="org/target", revision=COMMIT, draft=("org/small", folder), dtype="float32")
    found = resolve(msgspec.structs.replace(asked, draft_revision=(COMMIT[::-1], "")))
    assert found.cascade == (str(tmp_path / "hub" / "models--org--small" / "snapshots" / COMMIT[::-1]),)
    assert found.draft == folder
    with pytest.raises(UsageError, match="cannot get 'org/small'"):
        resolve(msgspec.structs.replace(asked, draft_revision=(COMMIT, "")))
    with pytest.raises(UsageError, match="has no revision 'main'"):
        resolve(msgspec.structs.replace(asked, draft_revision=(COMMIT[::-1], "main")))


@pytest.mark.parametrize("name", ["smollm2", "smollm2-draft"])
def test_only_hub_models_have_revisions(name: str) -> None:
    with pytest.raises(UsageError, match="no revision 'v1'"):
        hub.resolve(name, revision="v1")


def test_importing_is_cheap() -> None:
    heavy = "{'torch', 'numpy', 'gguf', 'tokenizers', 'huggingface_hub', 'rich', 'safetensors'}"
    modules = "ssd.models.hub, ssd.models.pull, ssd.models.checkpoint, ssd.cli.models"
    code = f"import sys, {modules}; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
