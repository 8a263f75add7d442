"""An option is one entry in one table: every door takes it from there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ssd.config.descriptions import HEADINGS, described
from ssd.config.params import SamplingDefaults, Speculation
from ssd.launch.options import EngineOptions
from ssd.launch.server import ServerOptions
from tests.cli.test_cli import GROUPED

ROOT = Path(__file__).parent.parent.parent / "ssd"
ENTRIES = {
    "config/engine.py": (
        "    quantize: Annotated[",
        '    zeal: Annotated[int, Meta(ge=1, le=9), "How much zeal.", MEMORY, "-z"] = 3\n',
    ),
    "launch/options.py": (
        "    target: Annotated[",
        '    glow: Annotated[Literal["dim", "red"] | None, "How it glows.", OTHER, ADVANCED] = None\n',
    ),
}
DOORS = """
import inspect, json, sys
from click.testing import CliRunner
from ssd.cli.main import main
from ssd.errors import UsageError
from ssd.llm import LLM

def ssd(*arguments, **environment):
    found = CliRunner(env=environment).invoke(main, arguments)
    return found.stdout or found.stderr

dry = ("launch", "--dry-run")
try:
    LLM(zeal=10)
except UsageError as error:
    refused = str(error)
print(json.dumps({
    "default": ssd(*dry),
    "flag": ssd(*dry, "-z", "5"),
    "variable": ssd(*dry, SSD_ZEAL="6", SSD_GLOW="dim"),
    "file": ssd(*dry, "--config", "both.toml"),
    "bound": ssd(*dry, "--zeal", "10"),
    "choice": ssd(*dry, "--glow", "blue"),
    "all": {name: ssd(*name.split(), "--help-all") for name in json.loads(sys.argv[1])},
    "no_flag": ssd("generate", "hello", "--glow", "red"),
    "in_file": ssd("generate", "hello", "--config", "wrong.toml"),
    "arguments": {name: each.default for name, each in inspect.signature(LLM).parameters.items()},
    "words": LLM.__doc__,
    "refused": refused,
}))
"""


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each door says of two options that were written into the tables and nowhere else."""
    place = tmp_path_factory.mktemp("doors")
    copy = place / "ssd"
    for file in (*ROOT.iterdir(), *(ROOT / "config").iterdir(), *(ROOT / "launch").iterdir()):
        link = copy / file.relative_to(ROOT)
        link.parent.mkdir(exist_ok=True)
        if file not in (ROOT / "config", ROOT / "launch"):
            link.symlink_to(file)
    (place / "pyproject.toml").symlink_to(ROOT.parent / "pyproject.toml")
    for name, (before, entry) in ENTRIES.items():
        text = (ROOT / name).read_text()
        assert text.count(before) == 1
        (copy / name).unlink()
        (copy / name).write_text(text.replace(before, entry + before))
    (place / "both.toml").write_text('zeal = 7\nglow = "red"')
    (place / "wrong.toml").write_text('glow = "blue"')
    done = subprocess.run([sys.executable, "-c", DOORS, json.dumps(GROUPED)], cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_one_entry_is_a_flag_a_variable_and_a_key_of_the_file(doors: dict[str, Any]) -> None:
    values = [json.loads(doors[name])["zeal"] for name in ("default", "flag", "variable", "file")]
    assert values == [3, 5, 6, 7]
    assert "'--zeal' / '-z': 10 is not in the range 1<=x<=9" in doors["bound"]
    assert "'--glow': 'blue' is not one of 'dim', 'red'" in doors["choice"]


def test_one_entry_is_in_the_help_under_its_heading(doors: dict[str, Any]) -> None:
    for name, help in doors["all"].items():
        memory = help.partition("Memory and batches:\n")[2].partition("\n\n")[0]
        assert "-z, --zeal INTEGER RANGE" in memory and "How much zeal.  [default: 3;" in memory, name
    assert "--glow [dim|red]" in doors["all"]["launch"].partition("Other options:\n")[2]


def test_an_advanced_entry_is_in_the_file_alone_where_an_engine_runs_for_one_answer(doors: dict[str, Any]) -> None:
    assert "--glow" not in doors["all"]["generate"]
    assert doors["no_flag"] == "error: --glow is a flag of ssd launch; generate reads it in the file of --config\n"
    assert "'blue' is not one of 'dim', 'red' (in the file of --config)" in doors["in_file"]


def test_one_entry_is_an_argument_of_an_llm_with_its_words_and_its_check(doors: dict[str, Any]) -> None:
    assert doors["arguments"]["zeal"] == 3 and doors["arguments"]["glow"] is None
    assert "- `zeal`: How much zeal." in doors["words"] and "- `glow`: How it glows." in doors["words"]
    assert doors["refused"] == "zeal 10: expected int <= 9"


@pytest.mark.parametrize("table", [EngineOptions, ServerOptions, SamplingDefaults])
def test_every_field_of_a_table_is_described(table: type[msgspec.Struct]) -> None:
    check_described(table)


def check_described(table: type[msgspec.Struct]) -> None:
    entries = described(table)
    assert set(entries) == set(table.__struct_fields__)
    for name, option in entries.items():
        assert option.help.endswith(".") and option.heading in HEADINGS, name
    flags = [flag for option in entries.values() for flag in option.flags]
    assert len(flags) == len(set(flags))


def test_a_request_that_names_nothing_is_speculated_on_as_an_engine_without_options() -> None:
    assert EngineOptions().speculation() == Speculation()
    assert Speculation("ssd") == EngineOptions(mode="ssd").speculation()
