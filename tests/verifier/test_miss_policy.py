"""A backup from a plugin: one file and an entry point."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ssd.config.params import Mode, Speculation
from ssd.ipc.messages import LinkLoad
from ssd.speculation import backups as speculators
from ssd.verifier import misses
from ssd.verifier.missed_rows import MissedRows
from tests.draft.audit import World, plainly
from tests.draft.pair import Draft, Pair, config, params
from tests.models import tiny

PROMPTS = [tiny.token_ids(30, 30), [5, 6, 7, 8] * 6]
PLUGIN = """
from ssd.verifier.misses import MissPolicy

class WaitForOne(MissPolicy):
    decides_later = True
    asked = set()

    def depths(self, rows, costs):
        self.asked |= {sequence.request for sequence in rows}
        return {sequence.request: min(1, sequence.lookahead) for sequence in rows}

    def propose(self, sequence, costs):
        return [7, 131, 7]

class Broken(MissPolicy):
    def __init__(self):
        raise RuntimeError("cannot be made")
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plugin lies where installed packages do."""
    (tmp_path / "patience.py").write_text(PLUGIN)
    folder = tmp_path / "patience-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: patience\nVersion: 1\n")
    names = "one = patience:WaitForOne\nbroken = patience:Broken\njit = patience:Broken\n"
    (folder / "entry_points.txt").write_text(f"[ssd.backups]\n{names}")
    monkeypatch.syspath_prepend(str(tmp_path))
    for cached in (speculators.names, speculators.load):
        cached.cache_clear()
    yield
    for cached in (speculators.names, speculators.load):
        cached.cache_clear()


@pytest.mark.parametrize("steps", [None, 0], ids=["a draft that answers", "a silent draft"])
def test_it_decides_what_missed_rows_do_and_changes_no_token(world: World, steps: int | None) -> None:
    assert {"one", "broken", "jit"} <= set(speculators.names())
    settings = config(Speculation("ssd", 4, (1,), "one"))
    pair = Pair(settings, world.target, Draft(settings, world.draft, steps=steps))
    texts = pair.run(PROMPTS, params(2, 30))
    assert texts.ids == plainly(world, PROMPTS, 0.0, 30).ids
    policy = pair.proposer._policies.of(settings.speculation)
    assert policy.asked == {0, 1}  # type: ignore[attr-defined]
    assert sum(metrics.drafted_tokens for metrics in texts.metrics) > 0


def test_a_draft_that_is_far_away_is_not_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(MissedRows, "_wait", lambda rows, depths, began: waits.append(began))
    settings = config(Speculation("ssd", 4, (1,), "jit"))
    for rtt in (1e-9, 1.0):
        draft = Draft(settings, world.draft)
        draft.show_link(LinkLoad(rtt, *[0] * 6))
        waits.clear()
        pair = Pair(settings, world.target, draft)
        assert pair.run(PROMPTS, params(2, 30)).ids == plainly(world, PROMPTS, 0.0, 30).ids
        assert bool(waits) == (rtt < 1)


@pytest.mark.parametrize(("mode", "notes"), [("ngram", False), ("ssd", True)])
def test_a_row_that_never_waits_needs_no_reason(
    world: World, mode: Mode, notes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a draft nothing misses. With one that is silent, a row says why it goes on."""
    noted: list[int] = []
    monkeypatch.setattr(MissedRows, "note_reason", lambda rows, request, *_: noted.append(request))
    settings = config(Speculation(mode, 0 if mode == "ngram" else 4, (1,), "jit"))
    pair = Pair(settings, world.target, Draft(settings, world.draft, steps=0))
    assert pair.run(PROMPTS, params(2, 30)).ids == plainly(world, PROMPTS, 0.0, 30).ids
    assert bool(noted) is notes


def test_one_that_is_broken_is_none_and_replaces_no_other(world: World) -> None:
    settings = config(Speculation("ssd", 4, (1,), "broken"))
    pair = Pair(settings, world.target, Draft(settings, world.draft))
    assert pair.run(PROMPTS, params(2, 30)).ids == plainly(world, PROMPTS, 0.0, 30).ids
    assert isinstance(misses.load_policy("ssd", "jit"), misses.JustInTime)
