"""Whatever `ssd plan` cannot work with is told in one line, with exit status 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ssd.cli.main import main

SMALL = ("-k", "2,4", "--budget", "8", "--batch", "1,4")


def plan(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def assert_refused(result: Result, *words: str, exit_code: int = 2) -> None:
    assert result.exit_code == exit_code, (result.output, result.exception)
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert word in line
    assert result.stdout == ""


def test_a_missing_matplotlib_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = plan("--paper", *SMALL, "--plot", tmp_path / "plan.png")
    assert_refused(result, "--plot needs matplotlib", "pip install matplotlib", exit_code=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-k", "0"), ("-k", "'0'")),
        (("-k", "17"), ("-k", "from 1 to 16")),
        (("-k", "4-2"), ("-k", "upwards")),
        (("-k", ""), ("-k", "''")),
        (("-k", "1,,2"), ("-k", "1,,2")),
        (("-k", "auto"), ("-k", "auto")),
        (("-k", "7", "--budget", "7"), ("--budget", "K = 7", "8 chains")),
        (("-k", "3", "--budget", "3,8"), ("--budget", "a budget of 3")),
        (("--budget", "64"), ("--budget", "from 2 to 63")),
        (("--budget", ","), ("--budget",)),
        (("--batch", "0"), ("--batch", "from 1 to 256")),
        (("--batch", "1-999999"), ("--batch", "from 1 to 256")),
        (("--batch", "1-256"), ("--batch", "at most 64")),
        (("--verify=-3ms",), ("--verify", "'-3ms'")),
        (("--verify", "18"), ("--verify", "18.3ms")),
        (("--verify", "0"), ("no time",)),
        (("--verify", "9" * 400 + "s"), ("verify",)),
        (("--step=-1ms",), ("--step", "'-1ms'")),
        (("--overhead=-1ms",), ("--overhead", "'-1ms'")),
        (("--acceptance", "1.5"), ("--acceptance", "from 0 to 1")),
        (("--acceptance=-.1",), ("--acceptance", "from 0 to 1")),
        (("--acceptance", "nan"), ("--acceptance", "from 0 to 1")),
        (("--acceptance", ""), ("--acceptance", "''")),
        (("--acceptance", ",".join(["1"] * 65)), ("acceptance", "64")),
        (("--misses", ".2"), ("--misses", "1 numbers, not 2")),
        (("--misses=-.2,.6",), ("misses", ">= 0")),
        (("--misses", "nan,.6"), ("misses",)),
        (("--misses", ".2,inf"), ("misses",)),
        (("--target-gpus", "0"), ("--target-gpus",)),
        (("--target-gpus", "nan"), ("--target-gpus", "not a number")),
        (("--draft-gpus=-1",), ("--draft-gpus",)),
        (("--draft-gpus", "inf"), ("draft_gpus",)),
        (("--nonsense",), ("--nonsense",)),
        (("--target", "smollm2"), ("--target is of a pair on this machine", "--paper")),
        (("--temperature", "1"), ("--temperature is of a pair on this machine", "--paper")),
        (("--profile", "mine.json"), ("--paper or --profile",)),
        (("--plot", "plan.bmp"), ("--plot plan.bmp", ".png")),
        (("--plot", "plan"), ("--plot plan", ".png")),
        (("--plot", "/nowhere/plan.png"), ("/nowhere is no folder",)),
    ],
)
def test_bad_options_are_refused_in_one_line(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    assert_refused(plan("--paper", *arguments), *words)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert_refused(plan("--target", "/nowhere/model"), "/nowhere/model")
    assert_refused(plan("--profile", tmp_path / "p.json", "--draft", "d"), "--draft is of a pair", "--profile")


GOOD: dict[str, Any] = {"name": "x", "verify": {"fixed_s": 0.02}, "step": {"fixed_s": 0.002}}
GOOD |= {"acceptance": [0.8], "misses": {"c": 0.3, "r": 0.6}}


def test_the_shortest_profile_is_enough(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    file.write_text(json.dumps(GOOD))
    assert plan(*SMALL, "--profile", file).exit_code == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ("truncated",)),
        (b"{", ("truncated",)),
        (b"\xff\xfe", ("no profile",)),
        (b'{"name": "\xff"}', ("no profile",)),
        (b"[]", ("Expected `object`",)),
        (b"[" * 100_000, ("no profile",)),
        (b" " * (2**20 + 1), ("larger than 1048576 bytes",)),
        ({"speed": 3}, ("unknown field `speed`",)),
        ({"version": 2}, ("$.version",)),
        ({"verify": {"fixed_s": 0.02, "per_token": 0.1}}, ("unknown field `per_token`", "$.verify")),
        ({"verify": {"fixed_s": 0}}, ("no time",)),
        ({"verify": {"fixed_s": -0.02}}, (">= 0", "$.verify.fixed_s")),
        ({"step": {"fixed_s": "2ms"}}, ("$.step.fixed_s",)),
        ({"verify": []}, ("$.verify",)),
        ({"verify_alone": [[0, 0.01]]}, ("$.verify_alone[0][0]",)),
        ({"step_alone": [[1, 0]]}, ("$.step_alone[0][1]",)),
        ({"verify_alone": {"fixed_s": 0}}, ("verify_alone", "no time")),
        ({"acceptance": []}, ("$.acceptance",)),
        ({"acceptance": [1.2]}, ("<= 1", "$.acceptance[0]")),
        ({"acceptance": [float("nan")]}, ("malformed",)),
        ({"misses": None}, ("$.misses",)),
        ({"target_gpus": 0}, ("$.target_gpus",)),
        ({"assumed": {"steps": "guessed"}}, ("no figure 'steps'",)),
    ],
)
def test_a_bad_profile_is_named_with_its_fault(
    tmp_path: Path, content: bytes | dict[str, Any], words: tuple[str, ...]
) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(GOOD | content).encode())
    assert_refused(plan("--profile", file), str(file), *words)


def test_a_profile_without_a_figure_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_text(json.dumps({key: value for key, value in GOOD.items() if key != "misses"}))
    assert_refused(plan("--profile", file), "missing required field `misses`")


def test_files_that_cannot_be_read_or_written_are_refused(tmp_path: Path) -> None:
    assert_refused(plan("--profile", tmp_path / "none.json"), "cannot read", "No such file")
    assert_refused(plan("--profile", tmp_path), "cannot read", "directory")
    (tmp_path / "plan.png").mkdir()
    assert_refused(plan("--paper", *SMALL, "--plot", tmp_path / "plan.png"), "--plot", "it is a folder")
