"""Profiles made of runs: what goes in comes out, and what was not measured is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from ssd.bench import profiles
from ssd.bench.profiles import profile_of
from ssd.bench.settings import Sweep
from ssd.config.params import Mode, Speculation
from ssd.errors import UsageError
from ssd.ipc.public import Metrics
from ssd.planning import profile
from ssd.planning.profile import PAPER, Misses, Profile, read
from ssd.speculation.theory import expected_tokens
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


K, RATE = 4, 0.7
AR = [Metrics("ar", rounds=30, verify_ms=20.0, round_overhead_ms=1.0)]
ACCEPTED = round(3000 * (expected_tokens(RATE, K) - 1))
SD = [
    Metrics("sd", rounds=3000, drafted_tokens=3000 * K, accepted_tokens=ACCEPTED, verify_ms=24.0, round_overhead_ms=1.5)
]


def ssd(hits: int) -> list[Metrics]:
    return [Metrics("ssd", rounds=1000, hits=hits, misses=1000 - hits, draft_step_ms=3.0)]


def made(ar: list[Metrics] = AR, sd: list[Metrics] = SD, by_fan_out: dict[int, list[Metrics]] | None = None) -> Profile:
    return profile_of("pair", ar, sd, {1: ssd(600), 4: ssd(800)} if by_fan_out is None else by_fan_out, {"k": "4"})


def test_what_was_measured_is_in_the_profile() -> None:
    found = made()
    assert found.verify.line.at(1) == pytest.approx(0.021)  # a round of ar
    assert found.verify.line.at(1 + K) == pytest.approx(0.025)
    assert found.overhead_s == pytest.approx(0.0005)
    assert found.step.line == pytest.approx((0.003, 0.0))
    assert found.acceptance == pytest.approx((RATE,), abs=1e-3)
    assert (found.misses.c, found.misses.r) == pytest.approx((0.4, 0.5))
    assert set(found.assumed) == {"step", "acceptance", "target_gpus", "draft_gpus"}


def test_runs_count_by_their_rounds() -> None:
    slow = replace(AR[0], rounds=10, verify_ms=40.0)
    assert made(ar=[*AR, slow]).verify.line.at(1) == pytest.approx((30 * 20 + 10 * 40) / 40 / 1e3 + 0.001)


def test_noise_is_named_and_does_not_go_below_zero() -> None:
    found = made(sd=[replace(SD[0], verify_ms=19.0, round_overhead_ms=0.5)])
    assert found.verify.each_s == 0 and found.overhead_s == 0 and "noise" in found.assumed["verify"]
    backwards = made(by_fan_out={1: ssd(800), 4: ssd(600)})
    assert backwards.misses == Misses(pytest.approx(0.2), 0.6) and "noise" in backwards.assumed["misses"]


@pytest.mark.parametrize("by_fan_out", [{2: ssd(600)}, {2: ssd(600), 4: ssd(1000)}])
def test_one_fan_out_with_misses_takes_the_papers_exponent(by_fan_out: dict[int, list[Metrics]]) -> None:
    found = made(by_fan_out=by_fan_out)
    assert found.misses == Misses(pytest.approx(0.4 * 2**0.6), 0.6)
    assert "fewer than two" in found.assumed["misses"]


def test_without_an_outcome_the_misses_are_the_papers() -> None:
    found = made(by_fan_out={1: [Metrics("ssd", rounds=5, draft_step_ms=3.0)]})
    assert found.misses == PAPER.misses and "no outcome" in found.assumed["misses"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"ar": []}, "rounds of ar"),
        ({"sd": []}, "rounds of sd"),
        ({"sd": [replace(SD[0], drafted_tokens=0)]}, "draft tokens"),
        ({"by_fan_out": {}}, "runs of ssd"),
        ({"by_fan_out": {1: [Metrics("ssd", rounds=5)]}}, "made steps"),
    ],
)
def test_runs_that_are_missing_are_named(changed: dict[str, list[Metrics]], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        made(**changed)  # type: ignore[arg-type]


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    for written in (made(), PAPER):
        profile.write(written, file)
        assert profile.read(file) == written


def test_what_is_out_of_bounds_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="acceptance"):
        profile.write(replace(PAPER, acceptance=(float("nan"),)), tmp_path / "p.json")
    with pytest.raises(UsageError, match="cannot write"):
        profile.write(PAPER, tmp_path)
    assert list(tmp_path.iterdir()) == []
