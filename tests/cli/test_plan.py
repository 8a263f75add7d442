"""`ssd plan` as a user calls it: tables, JSON and plots."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from ssd.cli.main import main
from ssd.planning import profile
from ssd.planning.break_even import break_even, paying_batches
from ssd.planning.grid import Grid, Pair, forecast, neural_below, strict
from ssd.planning.profile import PAPER
from ssd.speculation.theory import LinearCost

SMALL = ("-k", "2,4", "--budget", "8", "--batch", "1,4")
GRID = Grid((2, 4), (8,))


def plan(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


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


def test_without_anything_it_is_the_papers_pair_and_says_so() -> None:
    result = plan()
    assert result.exit_code == 0, (result.output, result.exception)
    assert result.stderr == ""
    for words in (
        "Profile: the paper's Llama pair",
        "18.2ms+64us a token",
        "Batch 1: predicted tok/s; ar 54.8",
        "ssd B=32",
        "Best settings",
        "Break-even, tok/s per GPU: ar and sd on 4, ssd on 4 + 1",
        "neural below (Theorem 17)",
        "Per GPU, ssd on 4 + 1 GPUs is ahead of ar and sd on 4 at batch 1 to 34, and no longer from 35 on.",
        "a wider range, such as -k 1-16",
        "the paper's Llama pair's, not your machine's",
    ):
        assert words in result.stdout


def test_the_table_holds_the_predictions() -> None:
    found = forecast(PAPER.pair(), 4, GRID)
    rows = [line.split() for line in plan(*SMALL).stdout.replace("│", " ").splitlines()]
    for (lookahead, sd), setting in zip(found.sd, found.settings, strict=True):
        ssd = f"{setting.speed:.1f}"
        ratios = [f"{sd / found.ar:.2f}", f"{setting.speed / found.ar:.2f}", f"{setting.speed / sd:.2f}"]
        assert [str(lookahead), f"{sd:.1f}", ssd, ssd, *ratios] in rows


def test_a_budget_that_is_too_small_for_a_k_has_no_figure() -> None:
    rows = [line.split() for line in plan("-k", "4", "--budget", "4,8").stdout.replace("│", " ").splitlines()]
    assert [row for row in rows if row[:1] == ["4"] and len(row) == 8 and row[2] == "-"] == []
    rows = [line.split() for line in plan("-k", "2,4", "--budget", "4,8").stdout.replace("│", " ").splitlines()]
    assert [row for row in rows if row[:1] == ["4"] and len(row) == 8 and row[2] == "-"] != []


def test_json_agrees_with_the_functions() -> None:
    pair, found = PAPER.pair(), planned(*SMALL)
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
        assert entry["strict"] == strict(pair, entry["batch"], expected.best.fan_out)._asdict()
        assert entry["critical_batch"] == neural_below(pair, expected.best.fan_out)
        even = break_even(pair, expected, GRID)._asdict() | {"batch": entry["batch"]}
        assert entry["break_even"] | {"batch": entry["batch"]} == as_read(even)


def test_infinity_is_null() -> None:
    """No outcome is missed: the neural backup is never slower."""
    assert planned(*SMALL, "--misses", "0,1")["batches"][0]["critical_batch"] is None
    assert "every batch" in plan(*SMALL, "--misses", "0,1").stdout


OPTIONS = (
    *("--verify", "20ms+0.5ms", "--step", "3ms", "--overhead", "0.2ms", "--acceptance", ".8,.9"),
    *("--misses", ".3,.7", "--target-gpus", "2", "--draft-gpus", "0.5"),
)


def test_every_figure_can_be_given() -> None:
    pair = Pair(LinearCost(0.02, 0.0005), LinearCost(0.003, 0.0), (0.8, 0.9), (0.3, 0.7), 0.0002, 2.0, 0.5)
    found = planned(*SMALL, *OPTIONS)
    assert found["batches"][1]["best"]["ssd"] == as_read(forecast(pair, 4, GRID).best._asdict())
    assert found["batches"][1]["per_gpu"] == forecast(pair, 4, GRID).per_gpu(pair)
    assert set(found["sources"].values()) == {"option"}
    assert "not your machine's" not in plan(*SMALL, *OPTIONS).stdout


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


# -- plots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG\r\n\x1a\n"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_a_plot_is_a_file_of_its_kind(tmp_path: Path, suffix: str, start: bytes) -> None:
    file = tmp_path / f"plan{suffix}"
    result = plan(*SMALL, "--json", "--plot", file)
    assert result.exit_code == 0, (result.output, result.exception)
    content = file.read_bytes()
    assert content.startswith(start) and len(content) > 5000
    assert json.loads(result.stdout) and result.stderr == f"wrote {file}\n"


def test_both_parts_have_lines_of_each_mode_s_colour(tmp_path: Path) -> None:
    from matplotlib import colors, image

    file = tmp_path / "plan.png"
    assert plan(*SMALL, "--plot", file).exit_code == 0
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
