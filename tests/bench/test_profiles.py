"""A profile out of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from ssd.bench import profiles
from ssd.bench.settings import Sweep
from ssd.errors import UsageError
from ssd.params import Mode, Speculation
from ssd.profile import read
from tests.bench.runs import turns

AUTO = Speculation(num_speculative_tokens=0, fan_out=(), backup="auto")
HITS = {1: 60, 2: 70, 4: 80}


def test_a_profile_is_made_of_the_rounds_and_says_where_it_comes_from(tmp_path: Path) -> None:
    settings = Sweep(("ar", "sd"), (4,)).settings(AUTO)
    by_fan_out = profiles.fan_out_settings(settings, AUTO)
    assert [by_fan_out[count].speculation.fan_out for count in HITS] == [(1,), (2,), (4,)]
    runs = {
        "ar": turns(20.0, rounds=100, verify_ms=20.0),
        "sd": turns(20.0, rounds=100, verify_ms=22.0, drafted_tokens=400, accepted_tokens=150),
    }
    for count, hits in HITS.items():
        runs[by_fan_out[count].name] = turns(20.0, rounds=100, hits=hits, misses=100 - hits, draft_step_ms=3.0)
    file = tmp_path / "profile.json"
    profiles.write(file, "mine", runs, by_fan_out, {"k": 4, "cpu": "this one"})
    found = read(file)
    assert found.verify.line.at(1) == pytest.approx(0.020) and found.verify.line.at(5) == pytest.approx(0.022)
    assert found.step.line.fixed == pytest.approx(0.003)
    assert (found.misses.c, found.misses.r) == pytest.approx((0.4, 0.5), rel=0.02)
    assert found.source == {"k": "4", "cpu": "this one"}


@pytest.mark.parametrize("modes, lookaheads", [(("ar", "sd"), (0,)), (("ar", "sd"), (2, 4)), (("ar", "ssd"), (4,))])
def test_it_needs_both_modes_and_one_k(modes: tuple[Mode, ...], lookaheads: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="-k 4 --temperature 0"):
        profiles.fan_out_settings(Sweep(modes, lookaheads).settings(AUTO), AUTO)
