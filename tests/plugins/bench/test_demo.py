"""`ssd demo` on the real pair and on a model without a draft, as a shell sees it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from ssd.config.params import Speculation
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.plugins.bench import demo as demo_module
from ssd.plugins.bench.demo import _draft_words, _reported
from ssd.plugins.bench.runs import BenchTurn
from ssd.plugins.bench.settings import Setting
from tests.cli.test_generate import COMMAND, PROMPT, run
from tests.faults.engine import gone
from tests.models import tiny
from tests.plugins.bench.runs import completion, turns
from tools.soak.processes import roles

_ROW = re.compile(r"^│ (\w+) +│ ([\w+ ]+?) +│ +([\d.]+) │ +(?:at most )?([\d.]+) │ +([\d.]+) │$", re.MULTILINE)
_GAIN = re.compile(
    r"^  (.+?) +([\d.]+) -> +([\d.]+)  (?:at most )?([\d.]+) times \((\w+)(?:, disturbed)?\)$", re.MULTILINE
)


@pytest.fixture(scope="module")
def without_a_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model: no draft, no chat format."""
    model = tiny.llama(tmp_path_factory.mktemp("base"), vocab_size=300, max_position_embeddings=1024)
    tiny.tokenizer(model)
    (model / "chat_template.jinja").unlink()
    return model


@pytest.mark.parametrize("built_in", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_the_demo_shows_three_gains_and_compares_all_ids(built_in: bool, without_a_draft: Path) -> None:
    target = "smollm2" if built_in else str(without_a_draft)
    done = run("demo", "--max-tokens", "8", "--target", target)
    assert done.returncode == 0, done.stderr
    assert "with speculation, three times:" in done.stdout
    parts = re.split(r"\n(?:[1-9]\. |In short)", done.stdout)
    assert len(parts) == 5
    edit = "auto> Correct the spelling of this text" if built_in else "auto> # The code:\n\ndef area(width, height):\n"
    begun = ["auto> Write a short story", edit, "EMULATED: no GPU is used"]
    for part, beginning in zip(parts[1:-1], begun, strict=True):
        assert f"\n{beginning}" in part and part.endswith("The same tokens.\n")
    tables = [_ROW.findall(part) for part in parts[1:-1]]
    here = f"{len(os.sched_getaffinity(0))} cores".replace("1 cores", "1 core")
    assert [[row[:2] for row in table] for table in tables] == [
        *([("ar", here), ("auto", here)],) * 2,
        [(mode, "emulated") for mode in ("ar", "sd", "ssd")],
    ]
    gains = _GAIN.findall(parts[-1])
    assert [name for name, *_ in gains] == ["a story", "an edit", "70B, emulated"]
    for (_, *figures), table in zip(gains, tables, strict=True):
        mode, _, speed, over, _ = table[-1]
        assert figures == [table[0][2], speed, over, mode]
        length = float(table[-1][4])
        assert float(over) == pytest.approx(min(length, float(speed) / float(table[0][2])), rel=0.02, abs=0.01)
    draft = "For a story a draft (does not pay|pays) here" if built_in else "No draft is loaded"
    assert re.search(rf"^This machine: .+\. {draft}", parts[-1], re.MULTILINE)
    assert f"ssd serve {target}\n" in parts[-1]


@pytest.mark.parametrize("mode", [pytest.param("auto", marks=pytest.mark.thorough), "ssd"])
def test_the_demo_compares_with_plain_decoding_on_all_cores(mode: str) -> None:
    done = run("demo", PROMPT, "--max-tokens", "8", *(() if mode == "auto" else ("--mode", mode)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("The same tokens.\n")
    assert f"\n{mode}: " in done.stdout  # what the tuner chose
    shown = dict(re.findall(r"^│ (\w+) +│ ([\d+]+) cores? ", done.stdout, re.MULTILINE))
    assert {name: sum(map(int, cores.split("+"))) for name, cores in shown.items()} == dict.fromkeys(
        ("ar", mode), len(os.sched_getaffinity(0))
    )
    assert ("+" in shown[mode]) == (mode == "ssd" and len(os.sched_getaffinity(0)) > 1)


def test_other_ids_are_not_called_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    config = resolve(EngineOptions())
    settings = [Setting(mode, Speculation(mode, 4, (3,), "jit")) for mode in ("ar", "sd")]
    length = {"mean_acceptance_length": 2.0}
    alike = {"ar": turns(50.0, 50.0, ids=[1, 2]), "sd": turns(80.0, 100.0, ids=[1, 2], **length)}
    gain = _reported(config, settings, alike, completion([1, 2]))
    assert (gain.mode, gain.plain, gain.asked, gain.over) == ("sd", 50.0, 90.0, 1.8)
    said = capsys.readouterr().out
    assert said.endswith("The same tokens.\n") and "disturbed" not in said
    _reported(config, settings, alike, completion([1, 3]))
    assert capsys.readouterr().out.endswith("The tokens DIFFER: see docs/exactness.md.\n")
    _reported(config, settings, alike | {"sd": [alike["sd"][0], BenchTurn([completion([1, 3])], 80.0)]})
    assert capsys.readouterr().out.endswith("The tokens DIFFER: see docs/exactness.md.\n")


@pytest.mark.parametrize(
    "last", ["auto> # The code:", pytest.param("ssd target: emulated", marks=pytest.mark.thorough)]
)
def test_ctrl_c_ends_every_part_and_leaves_nothing(last: str, without_a_draft: Path, tmp_path: Path) -> None:
    """It comes after the line that begins with `last`."""
    process = subprocess.Popen(
        [*COMMAND, "demo", "--max-tokens", "16", "--target", without_a_draft],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith(last):
        assert line, "the demo has ended"
    pids = roles(process.pid)
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate()
    assert process.returncode == 130 and "Traceback" not in rest
    assert pids and all(gone(pid) for pid in pids.values())
    assert not list(tmp_path.glob("ssd-scripted-*"))


def test_a_gain_that_cannot_be_is_called_disturbed(capsys: pytest.CaptureFixture[str]) -> None:
    config = resolve(EngineOptions())
    settings = [Setting(mode, Speculation(mode, 4, (3,), "jit")) for mode in ("ar", "auto")]
    for speed, verdict in ((90.0, "pays"), (49.0, "does not pay"), (110.0, "does not pay")):
        faster = turns(speed, mean_acceptance_length=2.0, plan="sd, K 2: 90 tok/s expected")
        story = _reported(config, settings, {"ar": turns(50.0), "auto": faster})
        said = capsys.readouterr().out
        assert (speed == 110.0) == ("Other programs disturbed what" in said) == ("│ at most 2.00 │" in said)
        assert "2.20" not in said
        assert f"a draft {verdict} here: it was" in _draft_words(config, story)
    assert "by its plan above" in _draft_words(config, story._replace(plan="ngram: 90 tok/s expected"))


def test_the_page_has_the_words_of_the_demo() -> None:
    page = (Path(__file__).parents[3] / "docs" / "demo.md").read_text()
    for text in (demo_module._INTRODUCTION, demo_module._ABOUT_STORY, demo_module._ABOUT_EDIT, demo_module._ABOUT_PAIR):
        assert text in page
    assert f"{demo_module._LAST}\n{demo_module._NEXT}\n{demo_module._PLAN}".format(target="smollm2") in page
