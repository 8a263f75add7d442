"""What the sweep and the figures make of measurements; the measuring itself is the client's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click
import figures
import pytest
import sweep
from click.testing import CliRunner

from ssd.client import Completion
from ssd.ipc.messages import Metrics, Usage


def completion(ids: list[int], speed: float, rounds: int, accepted: int, hits: int, misses: int) -> Completion:
    metrics = Metrics(
        rounds=rounds, accepted_tokens=accepted, hits=hits, misses=misses, tokens_per_second=speed, draft_wait_ms=2.0
    )
    return Completion("", ids, [1], "length", Usage(1, len(ids)), metrics)


def test_speeds_are_compared_group_by_group_and_texts_one_by_one() -> None:
    plain = [[completion([1, 2], 10, 2, 0, 0, 0)], [completion([3, 4], 20, 2, 0, 0, 0)]]
    fast = [[completion([1, 2], 15, 1, 1, 3, 1)], [completion([3, 5], 50, 3, 2, 1, 3)]]
    found = sweep._figures("fast", 0.5, fast, plain)
    assert found.over_ar == pytest.approx((1.5 + 2.5) / 2)
    assert found.acceptance_length == pytest.approx(1 + 3 / 4)
    assert found.hit_rate == pytest.approx(4 / 8)
    assert (found.name, found.temperature, found.wait_ms, found.equal) == ("fast", 0.5, 2.0, 1)


def test_the_fastest_of_a_grid_are_measured_again_beside_ar_and_auto() -> None:
    rows = [("ar", 1.0), ("auto", 1.1), ("K 1", 1.2), ("K 2", 0.9), ("K 4", 1.5)]
    grid = [sweep.Figures(name, 0.0, 20.0, speed, 1.0, 0.0, 0.0, 1) for name, speed in rows]
    assert sweep._best(grid, 2) == ["ar", "auto", "K 4", "K 1"]


def test_every_setting_is_first_as_often() -> None:
    turns = [sweep._rotated(["a", "b", "c"], turn) for turn in range(6)]
    assert [turn[0] for turn in turns] == list("abcabc")
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)


def test_a_group_is_a_batch_and_too_few_prompts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(6)))
    assert sweep._groups(path, 3, 2) == [["p0", "p1"], ["p2", "p3"], ["p4", "p5"]]
    with pytest.raises(click.UsageError, match="6 prompts, 8 are needed"):
        sweep._groups(path, 4, 2)


def test_the_figures_show_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = figures.FOLDER / "samplers.json"
    (tmp_path / kept.name).write_text(kept.read_text())
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    result = CliRunner().invoke(figures.main)
    assert result.exit_code == 0, result.output
    drawn = (tmp_path / "hits.svg").read_text()
    samplers = {row["name"].partition(" Theorem 12")[0] for row in json.loads(kept.read_text()) if "12" in row["name"]}
    assert all(re.search(rf"<!-- {re.escape(sampler)} -->", drawn) for sampler in samplers)
    assert (tmp_path / "rounds.svg").stat().st_size > 1000 and (tmp_path / "batch.svg").stat().st_size > 1000
