"""`ssd plan` as a user calls it: one table of what was measured here, where it comes from, and the engine's choice."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from ssd.cli.main import main
from ssd.config.engine import EngineConfig
from ssd.config.params import AUTO_LOOKAHEAD, DRAFTED
from ssd.kernels import build
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.plugins.plan.command import measured
from ssd.tuning import knowledge
from ssd.tuning.costs import SITUATIONS, CostTable
from ssd.tuning.knowledge import PRIOR_FILE, Agreement, Knowledge
from ssd.tuning.plan import Choices
from ssd.tuning.predictor import ranked_plans
from ssd.tuning.tuner import Tuning
from tests.models import tiny

TABLES = {
    "verify": {1: 0.010, 4: 0.011, 5: 0.016, 8: 0.017},
    "verify_beside": {1: 0.014, 4: 0.015, 5: 0.022},
    "step": {1: 0.002, 16: 0.003},
    "step_beside": {1: 0.004, 16: 0.006},
}
LAWS = tuple(
    Agreement(((rate, 100), (rate + 0.1, 50)), tuple((hit, 100) for hit in (rate / 2, rate / 3, rate / 4)))
    for rate in (0.7, 0.5, 0.3)
)
KNOWN = Knowledge(LAWS, TABLES)


@dataclass
class Here:
    """A tiny pair, and the file in which an engine keeps what it has measured of it."""

    flags: tuple[str, ...]
    config: EngineConfig
    file: Path
    draft: Path

    def plan(self, *arguments: str) -> Result:
        result = CliRunner().invoke(main, ["plan", *self.flags, *arguments])
        assert result.exit_code == 0, (result.output, result.exception)
        return result

    def knows(self, known: Knowledge) -> None:
        knowledge.write(self.file, known)

    def rows(self, *arguments: str) -> list[list[str]]:
        """Return the cells of each K, without those that are empty."""
        lines = [line for line in self.plan(*arguments).stdout.splitlines() if line.startswith("│")]
        return [line.replace("│", " ").split() for line in lines]

    def said(self, *arguments: str) -> list[str]:
        """Return the sentences below the table."""
        return [line[2:] for line in self.plan(*arguments).stdout.splitlines() if line.startswith("- ")]


@pytest.fixture
def here(tmp_path: Path, own_cache: Path) -> Here:
    target, draft = (str(tiny.llama(tmp_path / name)) for name in ("target", "draft"))
    config = resolve(EngineOptions(target=target, draft=(draft,), target_cpus="0"))
    file = knowledge.file_of(config, str(build.library()))
    return Here(("--target", target, "--draft", draft, "--target-cpus", "0"), config, file, Path(draft))


def test_the_table_has_what_was_measured_and_the_speed_that_follows(here: Here) -> None:
    """By hand: rates .7 and .8 by position, a verification of 2 and 3 tokens between those of 1 and 4."""
    here.knows(KNOWN)
    plain, first, second, *others = here.rows()
    assert plain == ["0", "1.00", "10.00", "100.0"] and len(others) == AUTO_LOOKAHEAD - 2
    verify_ms = 10 + 1 / 3
    assert first[:6] == ["1", "0.70", "1.70", f"{verify_ms:.2f}", "2.00", f"{1e3 * 1.7 / (verify_ms + 2):.1f}"]
    verify_ms, tokens = 10 + 2 / 3, 1 + 0.7 + 0.7 * 0.8
    speed = 1e3 * tokens / (verify_ms + 4)
    assert second[:6] == ["2", "0.80", f"{tokens:.2f}", f"{verify_ms:.2f}", "4.00", f"{speed:.1f}"]
    assert [first[6], second[6]] == ["14.33", "14.67"]


@pytest.mark.parametrize("batch", [1, 4])
def test_each_k_of_ssd_has_the_chains_that_are_fastest(here: Here, batch: int) -> None:
    here.knows(KNOWN)
    tuning = Tuning()
    tuning.recall(KNOWN)
    tuning.situate([0] * batch, DRAFTED)
    figures = tuning.estimates.measurements(0, True)
    assert figures is not None
    budget = Choices.of(here.config.speculation).chains
    for row in here.rows("--batch", str(batch))[1:]:
        plans = ranked_plans(figures, batch, Choices(("ssd",), (int(row[0]),), (), budget))
        best = max(plans, key=lambda plan: plan.speed)
        chains = sum(best.fan_out)
        step_ms = 1e3 * CostTable(TABLES["step_beside"]).at(batch * chains)
        assert [row[7], row[8], row[10]] == [f"{step_ms:.2f}", str(chains), f"{best.speed:.1f}"]
    plain = here.rows("--batch", str(batch))[0]
    assert plain[-1] == f"{batch / CostTable(TABLES['verify']).at(batch):.1f}"


def test_a_draft_that_is_too_slow_hits_nothing(here: Here) -> None:
    slow = {**TABLES, "step_beside": {1: 0.1, 16: 0.1}}
    here.knows(Knowledge(LAWS, slow))
    assert {row[9] for row in here.rows()[1:]} == {"0.00"}
    here.knows(KNOWN)
    assert all(float(row[9]) > 0 for row in here.rows()[1:])


@pytest.mark.parametrize(("temperature", "rate"), [("0", 0.7), ("0.7", 0.5), ("0.71", 0.3), ("1", 0.3)])
def test_acceptance_is_that_of_the_temperature_s_kind(here: Here, temperature: str, rate: float) -> None:
    here.knows(KNOWN)
    rows = here.rows("--temperature", temperature)
    assert [row[1] for row in rows[1:3]] == [f"{rate:.2f}", f"{rate + 0.1:.2f}"]


def test_the_last_line_is_the_choice_of_an_engine_that_starts_now(here: Here) -> None:
    """A draft whose steps take nothing is used. One that is as slow as its target is not, nor one that earlier
    processes found to be slower than predicted."""
    fast, slow = ({**TABLES, "step": step, "step_beside": step} for step in ({1: 1e-4, 16: 1e-4}, {1: 0.01, 16: 0.02}))
    disappointing = {f"{batch} {mode}": -1.0 for batch in (1, 4) for mode in ("sd", "ssd", "chains")}
    for known, drafted in (
        (Knowledge(LAWS, fast), True),
        (Knowledge(LAWS, slow), False),
        (Knowledge(LAWS, fast, disappointing), False),
    ):
        here.knows(known)
        last = here.said()[-1]
        assert (
            last.startswith("--mode auto takes ") and ("takes plain decoding with prompt lookup" in last) is not drafted
        )
        engine = Tuning()
        engine.recall(known)
        engine.estimates.ends = True
        engine.situate([0], DRAFTED)
        assert last == f"--mode auto takes {engine.described(here.config.speculation)}."


def test_it_says_what_was_not_measured_here(here: Here) -> None:
    here.knows(KNOWN)
    times = f"Times were measured when this pair started here; delete {here.file} to measure again."
    assert here.said()[:-1] == [times]
    here.knows(Knowledge((), TABLES))
    assert here.said()[0].startswith("Acceptance and hit rates are guesses: run ssd bench latency")
    (here.draft / PRIOR_FILE).write_bytes(msgspec.json.encode(Knowledge(LAWS)))
    prior = "Acceptance and hit rates are not measured here: they are those of the draft's speculation.json."
    assert here.said()[0] == prior and here.rows()[1][1] == "0.70"
    here.knows(KNOWN)  # of an engine that began with the prior, and has learned nothing yet
    assert here.said()[:-1] == [prior, times]
    here.knows(Knowledge((replace(LAWS[0], acceptance=((0.71, 101), (0.8, 50))),), TABLES))
    assert here.said()[:-1] == [times]


def test_a_pair_is_measured_once_all_four_tables_have_times(here: Here) -> None:
    assert {*TABLES} == {*SITUATIONS} and measured(here.config) is None
    for tables, complete in (({}, False), ({**TABLES, "step": {}}, False), (TABLES, True)):
        here.knows(Knowledge(LAWS, tables))
        assert (measured(here.config) is not None) is complete


def test_a_pair_that_was_not_measured_is_started_once(here: Here) -> None:
    """On a busy machine the engine's two looks may disagree; then the plan says so, and the next one measures again."""
    result = here.plan()
    assert result.stderr == "starting target and draft once, to measure them\n"
    known = measured(here.config, rough=True)
    assert known is not None
    rough = "Other programs disturbed the measuring" in result.stdout
    assert (measured(here.config) is None) is rough and (str(here.file) in result.stdout) is not rough
    assert "Acceptance and hit rates are guesses" in result.stdout
    (plain,) = (line for line in result.stdout.splitlines() if line.startswith("│ 0 "))
    assert plain.replace("│", " ").split()[-1] == f"{1 / known.tables['verify'][1]:.1f}"


def test_disturbed_times_are_used_and_named_rough_and_no_engine_begins_with_them(here: Here) -> None:
    here.knows(Knowledge(LAWS, rough=TABLES))
    assert measured(here.config) is None
    found = measured(here.config, rough=True)
    assert found is not None and found.tables == TABLES
    engine = Tuning()
    engine.recall(Knowledge(LAWS, rough=TABLES))
    assert engine.estimates.costs.of("verify") is None
    engine.recall(KNOWN)
    engine.estimates.costs.disturbed = True
    assert engine.knowledge().rough == TABLES and not engine.knowledge().tables


@pytest.mark.parametrize("arguments", [["--help"], ["--batch", "0"]])
def test_help_and_refusals_load_nothing_heavy(arguments: list[str]) -> None:
    script = (
        "import atexit, sys\n"
        "heavy = ('torch', 'numpy', 'rich', 'zmq')\n"
        "atexit.register(lambda: print('loaded:', [name for name in heavy if name in sys.modules]))\n"
        f"from ssd.cli.main import main; main(['plan', *{arguments!r}])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "loaded: []", result.stderr
