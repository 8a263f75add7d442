"""The tool from its options to its table, on a fast emulated pair."""

from __future__ import annotations

import json
from pathlib import Path

import emulate
import pytest
from click.testing import CliRunner
from emulating.cases import cases
from emulating.figures import simulated_gain

from ssd.emulation.devices import PRESETS
from ssd.speculation.theory import ssd_over_sd


def test_every_mode_is_measured_and_says_the_same(tmp_path: Path) -> None:
    out = tmp_path / "emulated.json"
    arguments = [
        "--emulate",
        "verify=2ms,depth=0.2ms",
        "--case",
        "paper",
        "--batch",
        "2",
        "--temperature",
        "0",
        "--runs",
        "1",
        "--tokens",
        "40",
    ]
    result = CliRunner().invoke(emulate.main, [*arguments, "--json", str(out)])
    assert result.exit_code == 0, (result.output, result.exception)
    assert "Emulated" in result.output
    (row,) = json.loads(out.read_text())["rows"]
    assert row["emulated"] == "verify=2ms,depth=200us" and row["synthetic"]["acceptance"] == 0.888
    assert (row["equal"], row["texts"]) == (4, 4)
    assert list(row["modes"]) == ["ar", "sd", "ssd"] and all(m["beyond_ms"] > 0 for m in row["modes"].values())


def test_a_temperature_without_a_stated_acceptance_is_refused() -> None:
    result = CliRunner().invoke(emulate.main, ["--temperature", "0.5"])
    assert result.exit_code == 2 and "llama states no acceptance at temperature 0.5" in result.output


def test_an_engine_that_costs_nothing_reaches_the_ceiling_where_all_outcomes_are_foreseen() -> None:
    case = next(cases(PRESETS["llama"], (0.0,)))
    tokens = case.stated.acceptance_length
    draft = case.stated.lookahead * case.times.depth.fixed_s / case.times.verify.fixed_s
    assert simulated_gain(case, 1, tokens, 1.0) == pytest.approx(ssd_over_sd(1.0, tokens, tokens, draft)[1], rel=0.01)
