"""What is made of runs."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ssd.config.emulation import DeviceTimes, ForwardTime
from ssd.config.params import Speculation
from ssd.ipc.public import Metrics
from ssd.plugins.bench.figures import differing, predicted, quartiles, rows
from ssd.plugins.bench.report import BenchReport, sentences, tables
from ssd.plugins.bench.runs import BenchTurn
from ssd.plugins.bench.settings import Setting
from ssd.plugins.bench.setup import Setup
from tests.plugins.bench.runs import completion, turns

AR = Setting("ar", Speculation("ar"))
SD2, SD4 = Setting("sd K=2", Speculation("sd", 2, (3,), "jit")), Setting("sd K=4", Speculation("sd", 4, (3,), "jit"))
SSD = Setting("ssd", Speculation("ssd", 4, (3,), "jit"))
AUTO = Speculation(num_speculative_tokens=0, fan_out=(), backup="auto")


def test_speeds_are_medians_and_ratios_are_of_turns_that_belong_together() -> None:
    runs = {"ar": turns(10, 20, 40), "ssd": turns(30, 30, 30)}
    plain, fast = rows([AR, SSD], runs, 0.0)
    assert (plain["tok_s"], plain["over_ar"]) == (20, 1)
    assert fast["tok_s_quartiles"] == [30, 30]
    assert fast["over_ar"] == pytest.approx(1.5)  # of 3, 1.5 and 0.75
    assert (fast["k"], fast["fan_out"], fast["backup"]) == (4, "3", "jit") and "k" not in plain


def test_sd_is_what_it_is_over_the_same_k_only() -> None:
    runs = {"ar": turns(10, 10), "sd K=2": turns(20, 20), "sd K=4": turns(40, 40), "ssd": turns(60, 60)}
    found = {row["mode"]: row.get("over_sd") for row in rows([AR, SD2, SD4, SSD], runs, 0.0)}
    assert found == {"ar": None, "sd K=2": 1, "sd K=4": 1, "ssd": 1.5}


def test_what_auto_chose_is_told_and_has_no_prediction() -> None:
    """Its rounds are of several modes, for which no theory is one number."""
    said = "sd, K 2: predicted for the next rounds 30 tok/s, 20 with plain decoding with prompt lookup"
    looked_up = turns(30, mode="ngram", mean_acceptance_length=1.2)
    runs = {"ar": turns(10), "sd": turns(20, mean_acceptance_length=2.0), "ngram": looked_up}
    runs["auto"] = turns(40, plan=said)
    settings = [AR, *(Setting(mode, replace(AUTO, mode=mode)) for mode in ("sd", "ngram", "auto"))]
    _, sd, ngram, auto = found = rows(settings, runs, 0.0)
    assert (auto["plan"], auto["k"], auto["over_ar"], auto["over_sd"]) == (said, "auto", 4, 2)
    assert auto["over_best"] == pytest.approx(40 / 30)
    assert "over_best" not in sd  # of fixed settings, none is a goal
    assert "measured_over_predicted" not in auto and "plan" not in ngram
    assert ngram["measured_over_predicted"] == pytest.approx(0.5) and sd["over_sd"] == 1 and "over_sd" not in ngram
    assert "k" not in ngram and all(row["equal_to_ar"] == 1 for row in found)
    report = BenchReport("latency", {"device": "cpu"}, {}, "Equal hardware.", rows=found)
    assert sentences(report)[:2] == ["Equal hardware.", f"auto at T = 0, in the end: {said}."]


def test_an_emulation_is_named_in_titles_sentences_and_json() -> None:
    found = rows([AR], {"ar": turns(10)}, 0.0)
    times = DeviceTimes(verify=ForwardTime(0.01), depth=ForwardTime(0.002))
    plain, emulated = (BenchReport("latency", {}, {}, "", setup, rows=found) for setup in (Setup(), Setup(times)))
    words, late = "emulated: verify=10ms,depth=2ms", "Forwards took longer than emulated in ar (20.0 ms)"
    assert (plain.title_suffix, emulated.title_suffix) == ("", f" ({words})")
    assert emulated.as_json() == plain.as_json() | {"emulated": "verify=10ms,depth=2ms", "synthetic": None}
    assert any(line.startswith(late) for line in sentences(emulated))
    assert not any(line.startswith(late) for line in sentences(plain))
    assert str(tables(emulated, "medians")[0].title).endswith(f" ({words})")


def test_the_rest_are_means_over_requests_and_hits_over_rounds() -> None:
    answers = [
        completion([1], hits=9, misses=1, draft_wait_ms=1.0),
        completion([1], hits=1, misses=1, draft_wait_ms=2.0),
    ]
    (row,) = rows([SSD], {"ssd": [BenchTurn(answers, 100.0)]}, 0.0)
    assert row["hit_rate"] == pytest.approx(10 / 12) and row["wait_ms"] == 1.5
    (plain,) = rows([AR], {"ar": turns(1.0)}, 0.0)
    assert "hit_rate" not in plain
    never = completion([1], misses=4, mean_acceptance_length_on_miss=1.5)
    once = completion([1], hits=2, mean_acceptance_length_on_hit=3.0)
    (row,) = rows([SSD], {"ssd": [BenchTurn([never, once], 100.0)]}, 0.0)
    assert (row["on_hit"], row["on_miss"]) == (3.0, 1.5)
    for answer, lengths in ((never, (None, 1.5)), (once, (3.0, None))):
        (row,) = rows([SSD], {"ssd": [BenchTurn([answer], 100.0)]}, 0.0)
        assert (row["on_hit"], row["on_miss"]) == lengths
    assert "over_ar" not in row and "equal_to_ar" not in row


def test_an_answer_of_one_token_has_no_speed_and_no_round() -> None:
    """As when the end of text comes at once."""
    none = {"rounds": 0, "verify_ms": 0.0, "mean_acceptance_length": 1.0}
    runs = {"ar": [*turns(0.0, **none), *turns(50.0)], "ssd": [*turns(0.0, **none), *turns(75.0)]}
    for row, ratio in zip(rows([AR, SSD], runs, 0.0), (1, 1.5), strict=True):
        assert (row["over_ar"], row["verify_ms"]) == (ratio, 20.0) and row["tok_s"] == 50 * ratio
        assert row["measured_over_predicted"] == ratio and row["answers"] == row["equal_to_ar"] == 2
    for row in rows([AR, SSD], {name: turns(0.0, **none) for name in runs}, 0.0):
        assert (row["tok_s"], row["over_ar"], row["verify_ms"]) == (0, None, 0) and "measured_over_predicted" not in row


def test_ids_are_compared_where_they_have_to_be_equal() -> None:
    rule = Setting("ssd", Speculation("ssd", 4, (3,), "jit", sampler="rejection"))
    runs = {"ar": turns(1, 1, ids=[5]), "ssd": turns(1, 1, ids=[6])}
    for setting, temperature, equal in ((SSD, 1.0, 0), (rule, 0.0, 0), (rule, 1.0, None)):
        found = rows([AR, setting], runs, temperature)
        assert [row["equal_to_ar"] for row in found] == [2, equal]
        assert len(differing(found)) == (equal == 0)
    assert differing(rows([AR, SSD], runs, 0.0)) == ["ssd at T = 0: 2 of 2 answers have other ids than ar"]


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ({"mode": "ar"}, 50.0),
        ({"mode": "sd", "mean_acceptance_length": 3.0, "draft_wait_ms": 10.0}, 100.0),
        ({"mode": "ssd", "mean_acceptance_length": 1.5}, 75.0),
        (
            {  # all 0.5 x 40 ms of waiting are the misses', half of the rounds: 3 and 1 tokens in 20 and in 60 ms
                "mode": "ssd",
                "hits": 5,
                "hit_rate": 0.5,
                "mean_acceptance_length_on_hit": 3.0,
                "mean_acceptance_length_on_miss": 1.0,
                "draft_wait_ms": 20.0,
            },
            50.0,
        ),
    ],
)
def test_what_theory_makes_of_the_parts(figures: dict[str, object], expected: float) -> None:
    assert predicted(Metrics(verify_ms=20.0, **figures)) == pytest.approx(expected)  # type: ignore[arg-type]


def test_an_engine_that_has_no_times_is_not_predicted() -> None:
    (row,) = rows([AR], {"ar": turns(10, verify_ms=0.0)}, 0.0)
    assert "measured_over_predicted" not in row


def test_quartiles_of_few() -> None:
    assert quartiles([3.0]) == [3.0, 3.0]
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == [2.0, 4.0]
