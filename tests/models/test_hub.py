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
from ssd.models.checkpoint import inspect
from tests.models import ggufs, tiny

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


@pytest.mark.parametrize("name", ["missing.gguf", "bad/missing.gguf", "/bad/missing.gguf", "~/missing.gguf"])
def test_a_name_that_ends_in_gguf_is_a_file(name: str) -> None:
    with pytest.raises(UsageError, match=r"^no such file: .*missing\.gguf$"):
        hub.resolve(name)


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


def cached(tmp_path: Path, *files: str) -> Path:
    """A hub's repository in the cache, with a tiny GGUF under each of these names."""
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    tiny.tokenizer(snapshot)
    for name in files:
        (snapshot / name).parent.mkdir(exist_ok=True)
        ggufs.write(snapshot / name)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


def test_a_type_names_a_gguf_file_of_a_repository(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "name.Q4_K_M.gguf", "name-q8_0.gguf", "mmproj-name-q8_0.gguf", "UD-Q4_K_XL.gguf")
    for quant, file in (("Q4_K_M", "name.Q4_K_M.gguf"), ("Q8_0", "name-q8_0.gguf"), ("UD-Q4_K_XL", "UD-Q4_K_XL.gguf")):
        directory = hub.resolve(f"org/name:{quant}")
        assert {info.file for info in inspect(directory).tensors.values()} == {snapshot / file}
        assert directory == hub.resolve(f"org/name:{quant}", revision=COMMIT) == hub.resolve(str(snapshot / file))


def test_a_type_that_names_no_file_or_several_is_refused(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "a.Q4_0.gguf", "b-Q4_0.gguf")
    with pytest.raises(
        UsageError, match=r"more than one GGUF file: say more of the name \(a\.Q4_0\.gguf, b-Q4_0\.gguf"
    ):
        hub.resolve("org/name:Q4_0")
    with pytest.raises(UsageError, match=r"no GGUF file there ends in Q4_K_M\.gguf"):
        hub.resolve("org/name:Q4_K_M")
    with pytest.raises(UsageError, match=r"no config\.json; .* as in org/name:Q4_K_M"):
        hub.resolve("org/name")
    assert not (snapshot / "config.json").exists()


@pytest.mark.parametrize("quant", ["Q4_K_M", "q4_k_m"])
def test_of_a_repository_only_the_files_of_the_type_are_fetched(quant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    files = ["a-Q4_K_M.gguf", "sub/a-Q4_K_M-00001-of-00002.gguf", "a-Q4_K_S.gguf", "a.safetensors", "tokenizer.json"]
    kept: list[str] = []

    def download(name: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        kept.extend(filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        raise OSError(name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(UsageError, match="cannot get 'org/name' from the hub: org/name"):
        hub.resolve(f"org/name:{quant}")
    assert kept == [files[0], files[1], files[4]]


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
