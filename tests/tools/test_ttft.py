"""The tool that times first tokens: what it makes of times, and that it runs."""

from __future__ import annotations

import pytest
import ttft
from click.testing import CliRunner


@pytest.fixture
def reading() -> ttft._Reading:
    """Asked for at 10 s, read in chunks of 1, 2 and 3 s from 10.1 s on; a step of 0.1 s before, some of 0.1 s after.
    One request saw the rest of the second chunk and the third, one that and the second."""
    ends = [9.9, 10.0, 10.1, 11.1, 13.1, 16.1, 16.2, 16.3]
    return ttft._Reading(10.05, 16.099, ends, [(12.1, 16.101), (11.05, 13.099)])


def test_a_chunk_is_a_step_with_some_of_the_long_prompt(reading: ttft._Reading) -> None:
    assert reading.chunks == pytest.approx([1, 2, 3])


def test_steps_are_those_that_were_seen_at_all(reading: ttft._Reading) -> None:
    """Whichever comes first of what a step brings."""
    assert [reading.steps(*times) for times in [*reading.short, (9.95, 16.1), (13.2, 16.1), (13.2, 16.097)]] == [
        2,
        2,
        5,
        1,
        1,
    ]


def test_the_table_has_every_unit(reading: ttft._Reading) -> None:
    rows = ttft._rows("ar", [reading])
    assert rows[0] == ["ar", "1", "2000", "3000", "ms", "3025", "4001", "4001"]
    assert [row[-3:] for row in rows[1:]] == [["1.51", "2.00", "2.00"], ["1.01", "1.33", "1.33"], ["2", "2", "2"]]


def test_it_runs() -> None:
    result = CliRunner().invoke(ttft.main, ["--long", "600", "--chunk", "32", "--requests", "2"])
    assert result.exit_code == 0, result.output
    assert "2 short requests beside 600 tokens" in result.output
    for mode in ("ar", "ssd"):
        assert mode in result.output
