"""`ssd bench` on emulated devices and with stated agreement, as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_cli import assert_refused, ssd
from tests.models import tiny
from tests.plugins.bench.test_bench import MODES, SMALL, measured, no_engine, pair, refused, texts

__all__ = ["no_engine", "pair", "texts"]


def test_what_is_emulated_is_named_everywhere(pair: list[str], texts: str, tmp_path: Path) -> None:
    times = ("--emulate", "verify=3ms,depth=200us")
    found = measured(tmp_path, "latency", *pair, "--dataset", texts, *SMALL, *times, "--modes", "ar,sd", "-k", "2")
    assert (found["emulated"], found["synthetic"]) == ("verify=3ms,depth=200us", None)
    assert found["stdout"].count("(emulated: verify=3ms,depth=200us)") == 2  # tables
    assert all(row["verify_ms"] >= 3 and row["equal_to_ar"] == 3 for row in found["rows"])
    assert "Synthetic" not in found["stdout"]


def test_a_synthetic_pair_is_as_right_as_stated_and_named_so(tmp_path: Path) -> None:
    """How right it is, the tests of the pair say; here it may be too late at times, as the machine likes."""
    asked = ("--synthetic-acceptance-length", "3", "--synthetic-hit-rate", "0.8", "-k", "4", "-f", "2")
    size = ("--prompts", "4", "--batch-size", "4", "--tokens", "60", "--repeats", "1", "--temperature", "0")
    more = ("--temperature", "1", "--emulate", "verify=8ms,depth=0")
    found = measured(tmp_path, "throughput", *asked, *size, *more)
    words = "emulated: verify=8ms,depth=0; synthetic: acceptance length 3, hit rate 0.8"
    assert found["synthetic"] == {
        "acceptance_length": pytest.approx(3),
        "acceptance": pytest.approx(0.741, abs=1e-3),
        "hit_rate": 0.8,
        "k": 4,
        "fan_out": 2,
    }
    assert " ".join(found["stdout"].split()).count(f"({words})") == 4  # two tables for each temperature
    assert "Synthetic: the texts of a script mean nothing" in found["stdout"]
    assert found["workload"]["dataset"] == "random" and found["engine"]["draft_format"] == "float32"
    assert [row["equal_to_ar"] for row in found["rows"]] == [4] * 2 * len(MODES)
    assert all(row["acceptance_length"] > 1 for row in found["rows"] if row["mode"] == "sd")


def test_a_preset_brings_its_pair(tmp_path: Path) -> None:
    size = ("--prompts", "1", "--tokens", "24", "--modes", "sd")
    found = measured(tmp_path, "latency", "--emulate", "qwen", *size, "--temperature", "1")
    assert found["emulated"] == "verify=11.2ms+30us,depth=1.8ms+2.2us"
    assert (found["synthetic"]["acceptance"], found["synthetic"]["k"], found["rows"][0]["k"]) == (0.53, 4, 4)


def test_random_weights_are_measured_with_the_agreement_that_is_stated(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**tiny.SIZES, "model_type": "llama", "vocab_size": 1100}))
    models = ("--load-format", "dummy", "--target", tmp_path, "--draft", tmp_path)
    stated = ("--synthetic-acceptance-length", "3", "-k", "4", "-f", "3")
    size = ("--input-len", "16", "--modes", "ar,sd", "--prompts", "2", "--tokens", "96", "--dataset", "random")
    found = measured(tmp_path, "latency", *models, *stated, *size)
    assert found["emulated"] is None and found["synthetic"]["acceptance_length"] == pytest.approx(3)
    assert "synthetic: acceptance length 3" in found["stdout"]
    _, sd = found["rows"]
    assert sd["equal_to_ar"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["latency", "--emulate", "lama"], ["'lama' is neither a preset (llama, qwen, eagle3)"]),
        (["latency", "--emulate", "verify=1ms"], ["lacks the time of depth"]),
        (["latency", "--emulate", "verify=1ms,verify=1ms,depth=0"], ["'verify' is given twice"]),
        (["latency", "--emulate", "verify=1,depth=0"], ["'1' is not a time"]),
        (["latency", "--emulate", "verify=99999s,depth=0"], ["--emulate", "<= 10000.0"]),
        (["latency", "--emulate", "llama"], ["--target is not for a synthetic pair"]),
        (["latency", "--emulate", "llama", "--temperature", "0.5"], ["no acceptance at temperature 0.5"]),
        (["latency", "--emulate", "llama", "--temperature", "0", "--temperature", "1"], ["needs one temperature"]),
        (["latency", "--emulate", "llama", "--dataset", "humaneval"], ["a scripted pair reads no texts"]),
        (["latency", "--synthetic-acceptance-length", "2", "-k", "4", "-f", "3"], ["needs --emulate"]),
        (["latency", "--emulate", "llama", "--synthetic-hit-rate", ".5"], ["needs --synthetic-acceptance-length"]),
        (["latency", "--emulate", "verify=1ms,depth=0", "--synthetic-acceptance-length", "2"], ["needs -k and -f"]),
        (["latency", "--emulate", "llama", "--synthetic-acceptance-length", "9"], ["from 1 to 8"]),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    no_engine: None, pair: list[str], arguments: list[str], words: list[str]
) -> None:
    refused(pair, arguments, words)


def test_nan_is_no_number() -> None:
    arguments = ["bench", "latency", "--synthetic-acceptance-length", "nan"]
    assert_refused(ssd(*arguments), arguments[-2], "'nan' is not a number")
