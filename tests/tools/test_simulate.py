"""The paper's tables, reproduced within the stated bounds."""

from __future__ import annotations

import pytest

from ssd.config.params import Speculation
from ssd.law import Law
from ssd.speculation.fan_out import miss_law
from tests.draft.audit import plainly, world_in
from tests.draft.pair import config
from tools.distill.evaluation import Answer
from tools.distill.shards import Conversation
from tools.simulate import paper, report, tables
from tools.simulate.calibration import inputs
from tools.simulate.pearl import compared
from tools.simulate.replay import Replay


@pytest.fixture(scope="module")
def cells() -> list[tables.Cell]:
    return tables.cells(inputs())


def test_every_cell_is_within_its_bound(cells: list[tables.Cell]) -> None:
    """5 % of the means, 10 % of every cell of the batch and temperature tables."""
    assert not [(c.table, c.row, c.column, f"{c.deviation:+.1%}") for c in report.beyond(cells)]
    assert {cell.bound for cell in cells if cell.table == "means"} == {0.05}
    assert {cell.bound for cell in cells if cell.table != "means"} == {0.10}


def test_no_cell_is_missing_and_most_are_predictions(cells: list[tables.Cell]) -> None:
    count = {name: sum(cell.table == name for cell in cells) for name in ("means", "temperature", "batch")}
    assert count == {"means": 2 * 3, "temperature": 4 * 5, "batch": 5 * 3}
    uses = [cell.use for cell in cells]
    assert uses.count("predicted") >= 25 and set(uses) == {"input", "fitted", "predicted"}
    assert len({(cell.table, cell.row, cell.column) for cell in cells}) == len(cells)


def test_what_is_fitted_is_what_is_said_to_be(cells: list[tables.Cell]) -> None:
    """No cell of `ssd` in the temperature table, one in the batch table."""
    fitted = {(c.table, c.column) for c in cells if c.use == "fitted"}
    assert fitted == {
        ("means", "sd"),
        ("means", "ssd"),
        ("data sets", "sd"),
        ("temperature", "sd"),
        ("temperature", "hits uniform"),
        ("batch", "sd"),
        ("batch", "cheap"),
    }
    assert [c.row for c in cells if (c.table, c.column, c.use) == ("batch", "cheap", "fitted")] == ["batch 1"]


def test_every_larger_deviation_has_a_cause(cells: list[tables.Cell]) -> None:
    lines = report.causes(cells)
    assert lines and not [line for line in lines if "no cause" in line]


def test_a_tree_beats_one_chain_by_less_where_its_chains_slow_the_draft() -> None:
    few, crowded = compared(0.75, 4, 8), compared(0.75, 64, 2)
    assert few.tree > 1.2 * few.pearl > 1.2 * few.sd > 1.2
    assert 1.2 * crowded.pearl > crowded.tree > crowded.pearl > crowded.sd


def test_both_backups_cross_as_in_the_paper(cells: list[tables.Cell]) -> None:
    """Theorem 17: the neural backup loses from batch 2 on, by more and more; it falls to ordinary decoding."""
    speed = {(c.row, c.column): c.simulated for c in cells if c.table == "batch"}
    ratios = [speed[f"batch {batch}", "neural"] / speed[f"batch {batch}", "cheap"] for batch in paper.BATCHES]
    assert ratios == sorted(ratios, reverse=True) and ratios[1] < 1
    assert speed["batch 16", "neural"] == pytest.approx(speed["batch 16", "sd"], rel=0.05)


def test_the_law_of_misses_fits_the_table_it_comes_from() -> None:
    for misses in paper.MISSES.values():
        c, r = miss_law(misses)
        assert all(abs(c * fan_out**-r / rate - 1) < 0.15 for fan_out, rate in misses.items())


def test_the_exponent_between_two_temperatures_is_between_theirs() -> None:
    at_0, at_3, at_7 = (inputs().temperature(t).statistics.misses[1] for t in (0.0, 0.3, 0.7))
    assert at_3 == pytest.approx(at_0 + 3 / 7 * (at_7 - at_0))


def test_more_draft_devices_bring_less_and_less() -> None:
    found = tables.drafts(inputs(), rounds=64)
    assert [d.drafts for d in found] == list(range(1, 9)) and [d.fan_out for d in found] == list(range(3, 25, 3))
    for column in ("hit_rate", "alone", "neural", "cheap"):
        speeds = [getattr(d, column) for d in found]
        assert speeds[7] > speeds[3] > speeds[0]
        assert speeds[7] - speeds[3] < speeds[3] - speeds[0]
    assert all(d.anytime > max(d.neural, d.cheap) for d in found)


@pytest.mark.parametrize("fan_out", [(2,), ()], ids=["listed", "joint"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_replay_plays_the_rounds_of_the_answer(
    fan_out: tuple[int, ...], temperature: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A draft that is the target is right about all tokens, another one about some."""
    world = world_in(tmp_path_factory.mktemp("replay"))
    speculation = Speculation("ssd", 4, fan_out, "jit", budget=10)
    prompt, settings = [5, 6, 7] * 4, config(speculation)
    (answer,) = plainly(world, [prompt], temperature, 62).ids
    told = [Answer(Conversation(prompt + answer, len(prompt)), Law(temperature, seed=100))]
    counts = Replay(settings, [world.target], speculation).run(told)
    if fan_out:
        assert (counts.rounds, counts.hits, counts.tokens) == (13, 13, 61)  # nothing is in flight at first
    else:  # it must learn that such flat scores are right, and may copy what the target would not
        assert counts.rounds <= 16 and counts.hits > 6
    assert counts.chains <= 10 * counts.rounds
    counts = Replay(settings, [world.draft], speculation).run(told)
    assert 57 <= counts.tokens <= 61 and counts.rounds > 13 and 0 < counts.hits < counts.rounds
