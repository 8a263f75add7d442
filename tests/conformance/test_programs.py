"""Programs that people start: aider, promptfoo, and the requests of Open WebUI's backend."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.conftest import saying
from tests.conformance.test_frameworks import OFFLINE
from tests.conformance.test_tools import MESSAGES, TOOLS

_HERE = Path(__file__).parent
_AIDER = _HERE.parents[1] / ".venv-aider/bin/aider"
_PROMPTFOO = _HERE / "promptfoo/node_modules/.bin/promptfoo"
_EDIT = ["greet.py\n", "```\n", 'def greet():\n    return "', 'hey"\n', "```"]
_TASK = "### Task:\nName three topics of this chat as JSON.\n### Chat:\nUSER: Why is the sky blue?\nASSISTANT: Light."


def run(*command: str | Path, directory: Path, **environment: str) -> str:
    """What a program prints; it must end well."""
    environment = {**os.environ, **OFFLINE, "HOME": str(directory), **environment}
    done = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=120, env=environment, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_aider_edits_a_file(tmp_path: Path) -> None:
    file = tmp_path / "greet.py"
    file.write_text('def greet():\n    return "hello"\n')
    run("git", "init", "--quiet", directory=tmp_path)
    options = ("--no-check-update", "--no-show-model-warnings", "--no-show-release-notes", "--analytics-disable")
    options += ("--yes-always", "--no-auto-commits", "--no-gitignore", "--no-pretty", "--map-tokens", "0")
    with saying(tmp_path / "editor", {"<assistant>": _EDIT, "<answer>": ["Done"]}) as url:
        where = ("--openai-api-base", f"{url}/v1", "--openai-api-key", "none", "--model", "openai/editor")
        given = ("--edit-format", "whole", "--message", "Say hey instead.", "greet.py")
        said = run(_AIDER, *options, *where, *given, directory=tmp_path)
    assert "Applied edit to greet.py" in said
    assert file.read_text() == 'def greet():\n    return "hey"\n'


@pytest.mark.skipif(not _PROMPTFOO.exists(), reason="npm has installed nothing here")
def test_promptfoo_judges_answers(server: str, tmp_path: Path) -> None:
    config, result = _HERE / "promptfoo/promptfooconfig.yaml", tmp_path / "result.json"
    run(
        _PROMPTFOO, "eval", "--config", config, "--no-cache", "--no-progress-bar", "--no-table", "--output", result,
        directory=tmp_path,
        OPENAI_BASE_URL=f"{server}/v1",
        OPENAI_API_KEY="none",
        PROMPTFOO_DISABLE_REMOTE_GENERATION="1",
        PROMPTFOO_DISABLE_TELEMETRY="1",
        PROMPTFOO_DISABLE_UPDATE="1",
    )  # fmt: skip
    found = json.loads(result.read_text())["results"]["results"]
    assert [(each["success"], each.get("error")) for each in found] == [(True, None)] * 2


def ask(url: str, body: dict[str, Any] | None = None) -> str:
    """An answer to Open WebUI, which sends a key in any case."""
    headers = {"Content-Type": "application/json", "Authorization": "Bearer sk-none"}
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return str(answer.read().decode())


def test_open_webui_lists_models_and_names_a_chat(server: str) -> None:
    """`tests/first_messages.py` has its first message, with its tools."""
    (model,) = json.loads(ask(f"{server}/v1/models"))["data"]
    chat = {"model": model["id"], "messages": [{"role": "user", "content": _TASK}], "stream": False}
    for limit in ({"max_completion_tokens": 40}, {"max_tokens": 40}):  # a title, tags
        answer = json.loads(ask(f"{server}/v1/chat/completions", {**chat, **limit}))
        assert answer["choices"][0]["message"]["content"] and answer["usage"]["completion_tokens"] <= 40


def test_open_webui_goes_on_after_its_tools_own_results(caller: str) -> None:
    """It puts the calls of a stream together itself, and sends them back with their index, and results in parts."""
    chat = {"model": "caller", "stream": True, "stream_options": {"include_usage": True}, "tools": TOOLS}
    calls: dict[int, dict[str, Any]] = {}
    messages = [*MESSAGES]
    for _ in range(2):
        lines = ask(f"{caller}/v1/chat/completions", {**chat, "messages": messages}).splitlines()
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert events[-1]["usage"]["completion_tokens"] > 0 and lines[-2:] == ["data: [DONE]", ""]
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        said = "".join(delta.get("content") or "" for delta in deltas)
        calls = {call["index"]: call for delta in deltas for call in delta.get("tool_calls", ())}
        messages.append({"role": "assistant", "content": said, "tool_calls": list(calls.values())})
        for call in calls.values():
            parts = [{"type": "text", "text": f"Sunny in {json.loads(call['function']['arguments'])['city']}"}]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": parts})
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert said == "It is sunny." and not calls
