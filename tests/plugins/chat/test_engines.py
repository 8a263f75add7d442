"""`ssd chat` at the engines of other tests: one that wants keys, and the built-in pair, whose texts all doors share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ssd.client import Completion
from tests.cli.test_keys_address import Engine, engine
from tests.cli.test_keys_address import ssd as with_keys
from tests.test_doors import PROMPTS, SHORT, Doors, doors, ssd, told

__all__ = ["doors", "engine", "told"]


def test_it_reaches_an_engine_with_the_keys_of_a_client(engine: Engine, tmp_path: Path) -> None:
    folder = tmp_path / "keys" / "clients" / "laptop"
    done = with_keys("chat", "--address", engine.address, "--keys", folder, said="hello\n")
    assert done.returncode == 0 and "hello" in done.stdout, done.stderr


def test_it_gets_the_same_text_as_other_doors(doors: Doors, told: list[Completion], tmp_path: Path) -> None:
    lines = [line for n, prompt in enumerate(PROMPTS) for line in (prompt, f"/save {tmp_path / str(n)}", "/clear")]
    ssd("chat", "--address", doors.client.address, "--max-tokens", str(SHORT), given="\n".join(lines))
    for number, completion in enumerate(told):
        (_, answer) = json.loads((tmp_path / str(number)).read_text())["messages"]
        assert len(answer["content"]) > 20 or len(completion.token_ids) < SHORT
        assert completion.text.startswith(answer["content"])


@pytest.mark.parametrize("arguments", [["--help"], ["--temperature", "-1"]])
def test_help_and_refusals_do_not_load_torch(arguments: list[str]) -> None:
    script = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('torch' in sys.modules))\n"
        f"from ssd.cli.main import main; main(['chat', *{arguments!r}])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False", done.stderr
