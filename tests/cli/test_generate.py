"""`ssd generate` and `ssd launch` on the real pair, as a shell sees them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.cli.launched import SMALL_MODEL
from tests.faults.engine import gone
from tools.soak.processes import roles

COMMAND = [sys.executable, "-m", "ssd.cli.main"]
PROMPT = "Once upon a time there was a"
SMALL = ["generate", PROMPT, "--raw", "--seed", "5", "--max-tokens", "4", *SMALL_MODEL]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    """The answer to PROMPT."""
    done = run("generate", PROMPT, "--raw", "--json", "--max-tokens", "80", "--ignore-eos", "-k", "4")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def of_small() -> str:
    """What a small model says on stdout."""
    return run(*SMALL).stdout


def test_an_answer_says_what_was_planned_and_used(undisturbed: dict[str, Any]) -> None:
    result = undisturbed
    assert result["metrics"]["mode"] == "auto" and result["metrics"]["plan"]
    assert result["usage"] == {"prompt_tokens": len(result["prompt_token_ids"]), "completion_tokens": 80}


def test_the_output_obeys_a_schema_whatever_the_mode(tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 120}},
        "required": ["name", "age"],
    }
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    texts = set()
    for mode in ("ar", "ssd"):
        asked = "--temperature", "0.8", "--seed", "3", "--mode", mode, "--json-schema", str(file)
        done = run("generate", "Describe a person in JSON.", *asked)
        assert done.returncode == 0, done.stderr
        texts.add(done.stdout)
    (text,) = texts
    jsonschema.validate(json.loads(text), {**schema, "additionalProperties": False})


def test_no_grammar() -> None:
    """By an engine of its own; tests/cli/mistakes.txt has others, and those of a running engine."""
    done = run("generate", PROMPT, "--mode", "ar", "--grammar", __file__)
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: " in done.stderr and "structured output" in done.stderr


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_standard_streams_may_be_closed(closed: str, of_small: str) -> None:
    """What is opened later gets the lowest numbers that are free, and children inherit those of the streams."""
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", *COMMAND, *SMALL]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and of_small
    assert done.stdout == ("" if ">&- " in closed else of_small)


def test_a_prompts_file_is_a_batch_in_input_order(tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    prompts = ["One, two, three,", PROMPT, "def add(a, b):"]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    done = run("generate", "--prompts-file", str(file), "--raw", "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == 3
    assert results[1]["token_ids"] == undisturbed["token_ids"][:8]


def test_killing_the_draft_in_the_middle_changes_nothing_but_stderr(undisturbed: dict[str, Any]) -> None:
    """Its log lines wait for the end of the answer, those of other processes too."""
    arguments = ["generate", PROMPT, "--raw", "--ignore-eos", "--max-tokens", "80", "--mode", "ssd"]
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        env={**os.environ, "SSD_LOG": "INFO"},
    )
    assert process.stdout is not None
    while "the draft is up" not in process.stdout.readline().decode():
        pass  # the last line before the answer
    begun = process.stdout.read(20)  # the answer has begun
    os.kill(roles(process.pid)["draft"], signal.SIGKILL)
    rest, _ = process.communicate()
    assert process.returncode == 0
    answer, *lines = (begun + rest).decode().split("\nssd")
    assert answer == undisturbed["text"]
    assert any("draft was lost" in line for line in lines) and any(line.startswith(" target: ") for line in lines)


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_command_says_so_and_leaves_nothing(number: signal.Signals, status: int) -> None:
    process = subprocess.Popen(
        [*COMMAND, "generate", PROMPT, "--raw", "--ignore-eos", "--max-tokens", "1000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.read(10)
    pids = roles(process.pid)
    assert set(pids) == {"target", "draft", "frontend"}
    process.send_signal(number)
    _, stderr = process.communicate()
    assert process.returncode == status
    assert "Traceback" not in stderr
    assert all(gone(pid) for pid in pids.values())


def test_launch_serves_other_commands_and_drains_on_a_signal() -> None:
    server = subprocess.Popen([*COMMAND, "launch", "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = server.stdout.readline().removeprefix("http: ").strip()
    address = server.stdout.readline().removeprefix("ready: ").strip()
    pids = roles(server.pid)
    done = run("generate", "The capital of France is", "--raw", "--json", "--max-tokens", "4", "--address", address)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["usage"]["completion_tokens"] == 4
    asked = json.dumps({"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0})
    request = urllib.request.Request(f"{url}/v1/completions", asked.encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        assert json.load(answer)["choices"][0]["text"] == json.loads(done.stdout)["text"]
    server.send_signal(signal.SIGINT)
    server.communicate()
    assert server.returncode == 0
    assert all(gone(pid) for pid in pids.values())
    assert not Path(address.removeprefix("ipc://")).parent.exists()
