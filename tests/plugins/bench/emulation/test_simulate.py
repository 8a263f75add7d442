"""The command line of `tools.simulate`, which takes times in the notation of emulation."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from tools.simulate.__main__ import main


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_run_prints_its_figures() -> None:
    result = invoke("run", "-k", "7", "--fan-out", "3", "--batch", "4", "--drafts", "2", "--network-delay", "0.1ms")
    assert result.exit_code == 0, result.output
    for figure in ("tokens per second", "hit rate", "tokens per round", "target idle", "draft idle"):
        assert figure in result.output


def test_run_takes_times_with_units() -> None:
    result = invoke("run", "--mode", "ar", "--verify", "0.02s+500us", "--batch", "10", "--json")
    figures = json.loads(result.stdout)["figures"]
    assert figures["tokens_per_second"] == pytest.approx(1 / 0.025)


def test_run_spreads_the_budget_by_theorem_12() -> None:
    setup = json.loads(invoke("run", "-k", "4", "--acceptance", ".8", "--budget", "15", "--json").stdout)["setup"]
    assert setup["fan_out"] == [3, 3, 2, 2, 5]


def test_run_takes_pearls_chain_and_lists_with_zeros() -> None:
    for chains in ("pearl", "0,0,0,1"):
        setup = json.loads(invoke("run", "-k", "3", "--fan-out", chains, "--json").stdout)["setup"]
        assert setup["fan_out"] == [0, 0, 0, 1]


def test_a_run_can_be_repeated() -> None:
    once, again, other = (invoke("run", "--json", "--seed", seed).stdout for seed in ("1", "1", "2"))
    assert once == again != other


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--verify=-3ms"),
        ("run", "--verify", "3"),
        ("run", "--verify", "0"),
        ("run", "--step", "1ms+1us+1us"),
        ("run", "--network-delay", "soon"),
        ("run", "-k", "0"),
        ("run", "-k", "4", "--fan-out", "3,2"),
        ("run", "-k", "4", "--fan-out", "0"),
        ("run", "-k", "2", "--fan-out", "0,0,0"),
        ("run", "-k", "1", "--fan-out", "0,x"),
        ("run", "-k", "4", "--budget", "3"),
        ("run", "--batch", "65"),
        ("run", "--drafts", "0"),
        ("run", "--acceptance", "1.5"),
        ("run", "--acceptance", "high"),
        ("run", "--misses", ".2"),
        ("run", "--misses=-1,.5"),
        ("run", "--engine", "reference", "--backup", "auto"),
    ],
)
def test_bad_input_is_a_usage_error(arguments: tuple[str, ...]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    assert "Error" in result.stderr and result.stdout == ""
