"""Ranks on other machines, placed by what another package brings."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from ssd.config.engine import EngineConfig
from ssd.errors import UsageError
from ssd.launch.options import EngineOptions, chosen
from ssd.launch.resolve import resolve
from ssd.launch.supervisor import Engine
from ssd.system import registered
from tests.models import tiny

PLACED: list[EngineConfig | str] = []


def placed(config: EngineConfig, held: ExitStack) -> None:
    held.callback(PLACED.append, "released")
    PLACED.append(config)
    raise UsageError("no other machine is free")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor `elsewhere`, as an installed package brings it."""
    folder = tmp_path / "site" / "elsewhere-1.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(f"[{registered.EXECUTORS}]\nelsewhere = {__name__}:placed\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setattr(registered, "names", registered.names.__wrapped__)


def test_a_name_stands_for_the_places_of_the_other_ranks(elsewhere: None, tmp_path: Path) -> None:
    target = tiny.tokenizer(tiny.llama(tmp_path / "target", vocab_size=300))
    config = resolve(EngineOptions(target=str(target), mode="ar", tensor_parallel_size=2, executor="elsewhere"))
    assert config.ranks == range(1) and replace(config, executor="local").ranks == range(2)
    with pytest.raises(UsageError, match="no other machine is free"):
        Engine(config).start()
    assert [config, "released"] == PLACED
    with pytest.raises(UsageError, match="--executor elsewhere places the ranks of a target: give"):
        replace(config, tensor_parallel_size=1)
    with pytest.raises(UsageError, match="with --executor elsewhere the GPUs are those that Elsewhere gives"):
        replace(config, device="cuda:1")


def test_another_name_is_refused_with_those_that_there_are(elsewhere: None) -> None:
    with pytest.raises(UsageError, match=r"^--executor 'nowhere': there are local, (.*, )?elsewhere"):
        chosen(EngineOptions(executor="nowhere"))
