"""`ssd plan` as a user calls it: tables, JSON and plots."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from ssd.cli.main import main
from ssd.config.engine import EngineConfig
from ssd.config.params import DRAFTED, Speculation
from ssd.kernels import build
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.planning import profile
from ssd.planning.break_even import break_even, paying_batches
from ssd.planning.grid import Grid, Pair, forecast, forecast_remote
from ssd.planning.measured import is_measured, measured_here
from ssd.planning.profile import PAPER
from ssd.speculation.theory import LinearCost
from ssd.tuning import knowledge
from ssd.tuning.costs import SITUATIONS, CostTable
from ssd.tuning.estimates import Learner
from ssd.tuning.knowledge import PRIOR_FILE, Agreement, Knowledge
from ssd.tuning.tuner import Tuning
from tests.models import tiny

SMALL = ("-k", "2,4", "--budget", "8", "--batch", "1,4")
GRID = Grid((2, 4), (8,))


def plan(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def of_paper(*arguments: str | Path) -> Result:
    return plan("--paper", *arguments)


def planned(*arguments: str | Path) -> dict[str, Any]:
    result = plan(*arguments, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    assert result.stderr == ""
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def as_read(value: Any) -> Any:
    """A value as JSON gives it back."""
    return json.loads(json.dumps(value))


# -- what it says -----------------------------------------------------------------------------------------------------


def test_the_papers_pair_is_named_as_such() -> None:
    result = of_paper()
    assert result.exit_code == 0, (result.output, result.exception)
    assert result.stderr == ""
    for words in (
        "Profile: the paper's Llama pair",
        "18.2ms+64us a token",
        "Batch 1: predicted tok/s; ar 54.8",
        "ssd B=32",
        "Best settings",
        "Break-even, tok/s per GPU: ar and sd on 4, ssd on 4 + 1",
        "Per GPU, ssd on 4 + 1 GPUs is ahead of ar and sd on 4 at batch 1 to 28, and no longer from 29 on.",
        "a wider range, such as -k 1-16",
        "the paper's Llama pair's, not your machine's",
    ):
        assert words in result.stdout


def test_the_table_holds_the_predictions() -> None:
    found = forecast(PAPER.pair(), 4, GRID)
    rows = [line.split() for line in of_paper(*SMALL).stdout.replace("│", " ").splitlines()]
    for (lookahead, sd), setting in zip(found.sd, found.settings, strict=True):
        ssd = f"{setting.speed:.1f}"
        ratios = [f"{sd / found.ar:.2f}", f"{setting.speed / found.ar:.2f}", f"{setting.speed / sd:.2f}"]
        assert [str(lookahead), f"{sd:.1f}", ssd, ssd, *ratios] in rows


def test_a_budget_that_is_too_small_for_a_k_has_no_figure() -> None:
    rows = [line.split() for line in of_paper("-k", "4", "--budget", "4,8").stdout.replace("│", " ").splitlines()]
    assert [row for row in rows if row[:1] == ["4"] and len(row) == 8 and row[2] == "-"] == []
    rows = [line.split() for line in of_paper("-k", "2,4", "--budget", "4,8").stdout.replace("│", " ").splitlines()]
    assert [row for row in rows if row[:1] == ["4"] and len(row) == 8 and row[2] == "-"] != []


def test_json_agrees_with_the_functions() -> None:
    pair, found = PAPER.pair(), planned("--paper", *SMALL)
    assert [entry["batch"] for entry in found["batches"]] == [1, 4]
    assert found["paying_batches"] == as_read(paying_batches(pair, GRID))
    for entry in found["batches"]:
        expected = forecast(pair, entry["batch"], GRID)
        assert entry["ar"] == expected.ar
        assert [(sd["lookahead"], sd["speed"]) for sd in entry["sd"]] == list(expected.sd)
        assert entry["ssd"] == as_read([setting._asdict() for setting in expected.settings])
        assert entry["best"]["ssd"] == as_read(expected.best._asdict())
        assert (entry["best"]["sd"]["lookahead"], entry["best"]["sd"]["speed"]) == expected.best_sd
        assert entry["fastest"] == "ssd" and entry["per_gpu"] == expected.per_gpu(pair)
        even = break_even(pair, expected, GRID)._asdict() | {"batch": entry["batch"]}
        assert entry["break_even"] | {"batch": entry["batch"]} == as_read(even)


def test_a_draft_on_another_machine_is_planned_at_batch_1() -> None:
    found = planned("--paper", *SMALL, "--rtt", "5ms", "--rtt", "0.1s")
    best = forecast(PAPER.pair(), 1, GRID).best
    expected = [forecast_remote(PAPER.pair(), rtt, best.lookahead, best.fan_out) for rtt in (0.005, 0.1)]
    assert found["links"] == [link._asdict() for link in expected]
    assert planned("--paper", *SMALL)["links"] == []
    output = of_paper(*SMALL, "--rtt", "5ms").output
    assert "Draft on another machine, batch 1 (K 4, B 8): tok/s" in output and f"{expected[0].speed:.1f}" in output


OPTIONS = (
    *("--verify", "20ms+0.5ms", "--step", "3ms", "--overhead", "0.2ms", "--acceptance", ".8,.9"),
    *("--misses", ".3,.7", "--target-gpus", "2", "--draft-gpus", "0.5"),
)


def test_every_figure_can_be_given() -> None:
    pair = Pair(
        LinearCost(0.02, 0.0005), LinearCost(0.003, 0.0), (0.8, 0.9), (0.3, 0.7), 0.0002, target_gpus=2, draft_gpus=0.5
    )
    found = planned("--paper", *SMALL, *OPTIONS)
    assert found["batches"][1]["best"]["ssd"] == as_read(forecast(pair, 4, GRID).best._asdict())
    assert found["batches"][1]["per_gpu"] == forecast(pair, 4, GRID).per_gpu(pair)
    assert set(found["sources"].values()) == {"option"}
    assert "not your machine's" not in of_paper(*SMALL, *OPTIONS).stdout


def test_a_profile_is_read_and_an_option_wins(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    profile.write(replace(PAPER, name="mine", draft_gpus=2.0, assumed={"step": "a guess", "misses": "another"}), file)
    found = planned(*SMALL, "--profile", file, "--misses", ".1,.6")
    assert found["profile"]["draft_gpus"] == 2.0
    assert found["profile"]["misses"] == {"c": 0.1, "r": 0.6}
    assert found["profile"]["assumed"] == {"step": "a guess"}
    assert found["sources"]["verify"] == "profile mine.json"
    assert found["sources"]["step"] == "profile mine.json, not measured: a guess"
    assert found["sources"]["misses"] == "option"
    assert "not your machine's" not in plan(*SMALL, "--profile", file).stdout


# -- what was measured here --------------------------------------------------------------------------------------------

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


@dataclass
class Here:
    """A tiny pair, and the file in which an engine keeps what it has measured of it."""

    flags: tuple[str, ...]
    file: Path
    draft: Path

    def plan(self, *arguments: str) -> Result:
        return plan(*SMALL, *self.flags, *arguments)

    def planned(self, *arguments: str) -> dict[str, Any]:
        return planned(*SMALL, *self.flags, *arguments)

    def measured(self, knows: Knowledge) -> None:
        knowledge.write(self.file, knows)


def file_here(config: EngineConfig) -> Path:
    return knowledge.file_of(config, str(build.library()))


def config_of(here: Here) -> EngineConfig:
    return resolve(EngineOptions(target=here.flags[1], draft=(str(here.draft),), target_cpus="0"))


@pytest.fixture
def here(tmp_path: Path) -> Here:
    target, draft = (str(tiny.llama(tmp_path / name)) for name in ("target", "draft"))
    file = file_here(resolve(EngineOptions(target=target, draft=(draft,), target_cpus="0")))
    return Here(("--target", target, "--draft", draft, "--target-cpus", "0"), file, Path(draft))


def test_it_plans_with_what_the_engine_has_measured(here: Here) -> None:
    here.measured(Knowledge(LAWS, TABLES))
    found = here.planned()
    points = {name: tuple(map(tuple, found["profile"][name])) for name in ("verify", "verify_alone", "step")}
    assert points["verify"] == tuple(TABLES["verify_beside"].items())
    assert points["verify_alone"] == tuple(TABLES["verify"].items())
    assert points["step"] == tuple(TABLES["step_beside"].items())
    learner = Learner()
    learner.recall(LAWS[0])
    alone = CostTable(TABLES["verify"]), CostTable(TABLES["step"])
    beside = CostTable(TABLES["verify_beside"]), CostTable(TABLES["step_beside"])
    pair = Pair(*beside, (0.7, 0.8), learner.misses(), 0.0, *alone, draft_gpus=0.0)
    for entry in found["batches"]:
        expected = forecast(pair, entry["batch"], GRID)
        assert entry["ar"] == expected.ar
        assert [(sd["lookahead"], sd["speed"]) for sd in entry["sd"]] == list(expected.sd)
        assert entry["ssd"] == as_read([setting._asdict() for setting in expected.settings])
    assert found["sources"]["verify"] == found["sources"]["acceptance"] == "this machine"
    said = here.plan().stdout
    assert f"delete {here.file} to measure again" in said and "0.70, 0.80" in said and "not measured" not in said
    assert len(plan(*here.flags).stdout.splitlines()) <= 20, "it fits a screen"


def test_it_says_what_cores_bring_and_predicts_more_of_them(here: Here) -> None:
    here.measured(Knowledge(LAWS, TABLES))
    assert "by cores" not in here.plan().stdout, "none were measured"
    here.measured(Knowledge(LAWS, TABLES, cores={1: 0.020, 2: 0.012}))  # in a slower moment than the tables
    speeds = {found["cores"]: (found["speed"], found["measured"]) for found in here.planned()["cores"]}
    assert [measured for _, measured in speeds.values()] == [True, True, False, False, False]
    for cores, (speed, _) in speeds.items():
        assert speed == pytest.approx(0.6 / (0.002 + 0.008 / cores))
    said = " ".join(here.plan().stdout.split())
    assert "60 on 1, 100 on 2 measured, 150 on 4, 200 on 8, 240 on 16 predicted." in said
    here.measured(Knowledge(LAWS, TABLES, cores={1: 0.010, 2: 0.0095}))
    assert "predicted; beyond 1 a doubling brings under a tenth." in " ".join(here.plan().stdout.split())


def test_it_predicts_from_how_many_cores_on_a_draft_ahead_is_the_fastest(here: Here) -> None:
    """In `sd` both models use all cores. In `ssd` the draft keeps as many as here, and the target has the others."""
    here.measured(Knowledge(LAWS, TABLES, cores={1: 0.020, 2: 0.012}))
    assert here.planned()["more_cores"] == [], "models that share no core were not measured on others"
    config = resolve(EngineOptions(target=here.flags[1], draft=(str(here.draft),)))
    own, every = config.core_counts("target")
    here = Here(here.flags[:4], file_here(config), here.draft)
    here.measured(Knowledge(LAWS, TABLES, cores={1: 0.020, 2: 0.012}))
    found = {one.pop("cores"): one for one in here.planned()["more_cores"]}
    assert [*found] == [4, 8, 16] * (own < every)
    for cores, speeds in found.items():
        of_draft = every - own
        turn, ahead = ((0.004 + 0.016 / n) / (0.004 + 0.016 / m) for n, m in ((cores, every), (cores - of_draft, own)))
        verify, step, beside = (
            {size: by * seconds for size, seconds in TABLES[name].items()}
            for name, by in (("verify", turn), ("step", turn), ("verify_beside", ahead))
        )
        learner = Learner()
        learner.recall(LAWS[0])
        costs = CostTable(beside), CostTable(TABLES["step_beside"])
        pair = Pair(*costs, (0.7, 0.8), learner.misses(), 0.0, CostTable(verify), CostTable(step), draft_gpus=0.0)
        assert speeds == pytest.approx(forecast(pair, 1, GRID).speeds)
    fastest = [cores for cores, speeds in found.items() if max(speeds, key=speeds.__getitem__) == "ssd"]
    ends = f"ssd is the fastest from {fastest[0]} on." if fastest else "ssd is not the fastest."
    assert (ends in " ".join(here.plan().stdout.split())) == (own < every)
    assert here.planned("--step", "0.1ms")["more_cores"] == [], "figures by hand say nothing of cores"


def test_the_last_line_says_whether_a_draft_pays_and_agrees_with_auto(here: Here) -> None:
    """A draft whose steps take nothing pays; one that is as slow as its target does not, nor does one that earlier
    processes found to be slower than predicted."""
    fast, slow = ({**TABLES, "step": step, "step_beside": step} for step in ({1: 1e-4, 16: 1e-4}, {1: 0.01, 16: 0.02}))
    disappointing = {f"{batch} {mode}": -1.0 for batch in (1, 4) for mode in ("sd", "ssd", "chains")}
    for knows, pays in (
        (Knowledge(LAWS, fast), True),
        (Knowledge(LAWS, slow), False),
        (Knowledge(LAWS, fast, disappointing), False),
    ):
        here.measured(knows)
        last = here.plan().stdout.splitlines()[-1]
        assert last.startswith("- A draft pays here at batch 1, 4." if pays else "- A draft does not pay here.")
        tuning = Tuning()
        tuning.recall(knows)
        tuning.situate([0], True)
        assert (tuning.current(Speculation(num_speculative_tokens=0, fan_out=(), backup="jit")).mode in DRAFTED) is pays
    here.measured(Knowledge(LAWS, fast, disappointing))
    assert "A draft pays here" in here.plan("--step", "0.1ms").stdout, "with figures by hand the predictions count"


def test_a_written_plan_of_this_machine_is_a_profile(here: Here, tmp_path: Path) -> None:
    here.measured(Knowledge(LAWS, TABLES))
    found, file = here.planned(), tmp_path / "here.json"
    file.write_text(json.dumps(found["profile"]))
    assert planned(*SMALL, "--profile", file)["batches"] == found["batches"]


@pytest.mark.parametrize(("temperature", "rate"), [("0", 0.7), ("0.7", 0.5), ("0.71", 0.3), ("1", 0.3)])
def test_acceptance_is_that_of_the_temperature_s_kind(here: Here, temperature: str, rate: float) -> None:
    here.measured(Knowledge(LAWS, TABLES))
    found = here.planned("--temperature", temperature)
    assert found["profile"]["acceptance"] == pytest.approx([rate, rate + 0.1])


def test_what_the_draft_brings_along_is_not_called_measured(here: Here) -> None:
    guess = here_sources(here, Knowledge((), TABLES))
    assert guess["acceptance"] == guess["misses"] == "this machine, not measured: the tuner's first guess"
    (here.draft / PRIOR_FILE).write_bytes(msgspec.json.encode(Knowledge(LAWS)))
    prior = "this machine, not measured: the draft's speculation.json"
    assert here_sources(here, Knowledge((), TABLES))["acceptance"] == prior
    assert here.planned()["profile"]["acceptance"] == pytest.approx([0.7, 0.8])
    assert here_sources(here, Knowledge(LAWS, TABLES))["acceptance"] == prior  # an engine that began with it
    learned = replace(LAWS[0], acceptance=((0.71, 101), (0.8, 50)))
    assert here_sources(here, Knowledge((learned,), TABLES))["acceptance"] == "this machine"


def here_sources(here: Here, knows: Knowledge) -> dict[str, str]:
    here.measured(knows)
    sources: dict[str, str] = here.planned()["sources"]
    return sources


def test_options_win_over_what_was_measured(here: Here) -> None:
    here.measured(Knowledge(LAWS, TABLES))
    found = here.planned("--verify", "20ms", "--draft-gpus", "1")
    assert found["batches"][0]["ar"] == pytest.approx(50)
    assert found["profile"]["verify_alone"] is None
    sources = found["sources"]
    assert (sources["verify"], sources["draft_gpus"], sources["step_alone"]) == ("option", "option", "this machine")
    assert "verify_alone" not in sources


def test_a_pair_is_measured_once_all_four_tables_have_times(here: Here) -> None:
    config = config_of(here)
    assert {*TABLES} == {*SITUATIONS} and not is_measured(config)
    for tables, complete in (({}, False), ({**TABLES, "step": {}}, False), (TABLES, True)):
        here.measured(Knowledge(LAWS, tables))
        assert is_measured(config) is complete


def test_a_pair_that_was_not_measured_is_started_once(here: Here) -> None:
    """On a busy machine the engine's two looks may disagree; then the plan says so, and the next one measures again."""
    result = here.plan()
    started = "starting target and draft once, to measure them\n"
    assert (result.exit_code, result.stderr) == (0, started)
    *_, before, last = result.stdout.splitlines()
    assert last.startswith("- How often the models agree is not measured: run ssd bench latency first.")
    rough = "disturbed" in before
    assert is_measured(config_of(here), rough=True) and is_measured(config_of(here)) is not rough


def test_disturbed_times_are_planned_with_and_named_rough_and_no_engine_begins_with_them(here: Here) -> None:
    here.measured(Knowledge(LAWS, rough=TABLES))
    assert not is_measured(config_of(here)) and is_measured(config_of(here), rough=True)
    found = measured_here(config_of(here), 0.0)
    assert found.rough and found.profile.verify == tuple(TABLES["verify_beside"].items())
    assert found.tuning.estimates.costs.of("verify") is not None
    engine = Tuning()
    engine.recall(Knowledge(LAWS, rough=TABLES))
    assert engine.estimates.costs.of("verify") is None
    engine.recall(Knowledge(LAWS, TABLES))
    engine.estimates.costs.disturbed = True
    assert engine.knowledge().rough == TABLES and not engine.knowledge().tables


def test_a_pair_needs_a_draft(here: Here) -> None:
    result = plan(*here.flags[:2])
    assert (result.exit_code, result.stderr) == (2, "error: there is no draft for target: give --draft\n")


# -- plots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG\r\n\x1a\n"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_a_plot_is_a_file_of_its_kind(tmp_path: Path, suffix: str, start: bytes) -> None:
    file = tmp_path / f"plan{suffix}"
    result = of_paper(*SMALL, "--json", "--plot", file)
    assert result.exit_code == 0, (result.output, result.exception)
    content = file.read_bytes()
    assert content.startswith(start) and len(content) > 5000
    assert json.loads(result.stdout) and result.stderr == f"wrote {file}\n"


def test_both_parts_have_lines_of_each_mode_s_colour(tmp_path: Path) -> None:
    from matplotlib import colors, image

    file = tmp_path / "plan.png"
    assert of_paper(*SMALL, "--plot", file).exit_code == 0
    pixels = image.imread(file)[:, :, :3]
    half = pixels.shape[1] // 2
    for part in (pixels[:, :half], pixels[:, half:]):
        for name in ("tab:gray", "tab:blue", "tab:orange"):
            assert (abs(part - colors.to_rgb(name)).max(axis=2) < 0.01).sum() > 250


# -- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["-k", "0"]])
def test_help_and_refusals_load_nothing_heavy(arguments: list[str]) -> None:
    script = (
        "import atexit, sys\n"
        "heavy = ('torch', 'numpy', 'rich', 'matplotlib', 'zmq')\n"
        "atexit.register(lambda: print('loaded:', [name for name in heavy if name in sys.modules]))\n"
        f"from ssd.cli.main import main; main(['plan', *{arguments!r}])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "loaded: []", result.stderr
