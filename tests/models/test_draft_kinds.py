"""Drafts of a kind that is not installed are refused, with what is missing; a kind of another package is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from ssd.config.engine import Features
from ssd.draft.process import load
from ssd.errors import UsageError
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.models import checkpoint, draft_kinds, registry, sizes
from ssd.models.checkpoint import Checkpoint, inspect
from ssd.models.draft_kinds import PLAIN, DraftKind, draft_kind
from ssd.models.pairs import borrowed
from tests.models import tiny


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, DraftKind]:
    """The kinds that are installed: none, until the test adds one."""
    kinds: dict[str, DraftKind] = {}
    for module in (checkpoint, draft_kinds):
        monkeypatch.setattr(module, "load_all", lambda group: kinds)
    monkeypatch.setattr(checkpoint, "names", lambda group: sorted(kinds))
    return kinds


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tiny.tokenizer(tiny.llama(tmp_path / "target"), 131)


def fusing(directory: Path, **fields: Any) -> Path:
    """A draft that reads hidden states: a layer fuses them, and its embedding is the target's."""
    tiny.edit(tiny.llama(directory), **fields)
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    save_file(tensors | {"fc.weight": torch.zeros(32, 96)}, directory / "model.safetensors")
    return directory


def refused(target: Path, draft: Path) -> str:
    with pytest.raises(UsageError) as raised:
        resolve(EngineOptions(target=str(target), draft=(str(draft),)))
    return str(raised.value)


def test_a_draft_that_fuses_hidden_states_needs_a_kind(target: Path, tmp_path: Path) -> None:
    draft = fusing(tmp_path / "draft")
    message = refused(target, draft)
    assert f"{draft} reads hidden states of a target (fc.weight)" in message
    assert "is of no kind of draft that is installed (entry points `ssd.drafts`: none)" in message
    assert "fc.weight" in refused(draft, target)
    assert draft_kind(inspect(target)) is PLAIN


def test_a_kind_whose_plugin_is_missing_is_named_with_the_plugin(target: Path) -> None:
    missing = "(entry points `ssd.drafts`: none); the plugin `drafts` has block, eagle3 and mtp"
    assert refused(target, Path("mtp")) == f"no kind of draft 'mtp' is installed {missing}"
    known = resolve(EngineOptions(target=str(target)))
    features = Features(kind="eagle3", layers=(1,), width=96)
    config = msgspec.structs.replace(known, draft=str(target), features=features)
    with pytest.raises(UsageError) as raised:
        load(config)
    assert f"no kind of draft 'eagle3' is installed {missing}" in str(raised.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"speculators_model_type": "eagle3"}, "speculators of type 'eagle3' are not supported by a kind of draft"),
        ({"auto_map": {"AutoModel": "dflash.Model"}}, "has auto_map: .*, and no kind of draft is installed that might"),
    ],
)
def test_a_kinds_config_names_entry_points(target: Path, tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    draft = fusing(tmp_path / "draft", **fields)
    with pytest.raises(UsageError, match=rf"{message}.* \(entry points `ssd.drafts`: none\)"):
        inspect(draft)


class Fusing(DraftKind):
    name = "a fusing draft"

    def read_config(self, config: dict[str, Any], file: Path) -> dict[str, Any]:
        return config["layers"] | {"fuses": True} if "layers" in config else config

    def takes_config(self, config: Any) -> bool:
        return bool(config.get("fuses"))

    def recognises(self, model: Checkpoint) -> bool:
        return bool(model.config.get("fuses"))

    def layers(self, draft: Checkpoint, target: Checkpoint) -> tuple[int, ...]:
        return (1, 2)

    def borrows(self, draft: Checkpoint, target: Checkpoint) -> list[str]:
        return ["model.embed_tokens.weight"]

    def repeated(self, draft: Checkpoint) -> int:
        return 1000


class Within(Fusing):
    offer, in_target = ("draft within", "--draft within", ""), True

    def of_target(self, target: Checkpoint) -> Checkpoint | None:
        return inspect(target.directory.parent / "draft") if "has_draft" in target.config else None


def test_a_kind_is_asked_for_all_that_the_core_does_not_know(
    target: Path, tmp_path: Path, installed: dict[str, DraftKind]
) -> None:
    kind = installed["fusing"] = Fusing()
    draft = fusing(tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({"layers": config | {"auto_map": {"": "x.Y"}, "is_causal": False}}))
    model = inspect(draft)
    assert draft_kind(model) is kind and registry.has_file(model)
    whole = borrowed(model, inspect(target))
    assert sizes.weights(whole) == sizes.weights(inspect(target)) + 32 * 96 + 1000
    found = resolve(EngineOptions(target=str(target), draft=(str(draft),)))
    assert found.features is not None and (found.features.kind, found.features.layers) == ("fusing", (1, 2))
    assert found.features.width == 2 * 32
    assert "can only be a draft" in refused(draft, target)


def test_a_draft_in_the_targets_checkpoint_is_the_default(
    target: Path, tmp_path: Path, installed: dict[str, DraftKind]
) -> None:
    installed["within"] = Within()
    tiny.edit(fusing(tmp_path / "draft"), fuses=True)
    with pytest.raises(UsageError, match="has no draft within: give another --draft"):
        resolve(EngineOptions(target=str(target), draft=("within",)))
    assert resolve(EngineOptions(target=str(target))).draft is None
    tiny.edit(target, has_draft=True)
    for draft in ((), ("within",)):
        found = resolve(EngineOptions(target=str(target), draft=draft))
        assert found.draft == "within" and found.features is not None and found.features.kind == "within"
    assert resolve(EngineOptions(target=str(target), draft=("none",))).draft is None
