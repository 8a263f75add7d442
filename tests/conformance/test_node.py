"""Node's own clients. Skipped where there is no `node`; packages are skipped where `npm` has not installed them."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conformance.conftest import PEOPLE, TEXTS

NODE = shutil.which("node")
_PROGRAMS = Path(__file__).parent / "node"
pytestmark = pytest.mark.skipif(NODE is None, reason="there is no node here")

_TOO_LARGE = """
import http from 'node:http';
const [url, size] = [process.argv[1] + '/v1/completions', 64 * 2 ** 20];
const headers = {'content-type': 'application/json'};
const body = ' '.repeat(size);
const answer = await fetch(url, {method: 'POST', headers, body});
console.log(answer.status, (await answer.json()).error.code);
await new Promise((done, fail) => {
  const request = http.request(url, {method: 'POST', headers: {...headers, 'content-length': size}}, (answer) => {
    let text = '';
    answer.on('data', (part) => text += part);
    answer.on('end', () => { console.log(answer.statusCode, JSON.parse(text).error.code); done(); });
    answer.on('error', fail);
  });
  request.on('error', fail);
  request.end(body);
});
"""


def node(*arguments: str) -> str:
    """What a program prints; it must end well."""
    done = subprocess.run([str(NODE), *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.mock
def test_a_body_that_is_too_large_has_an_answer(mock_server: str) -> None:
    said = node("--input-type=module", "-e", _TOO_LARGE, mock_server)
    assert said.splitlines() == ["413 body_too_large"] * 2


@pytest.mark.skipif(not (_PROGRAMS / "node_modules").is_dir(), reason="npm has installed nothing here")
@pytest.mark.parametrize(
    ("client", "streamed"),
    [("openai_sdk", ""), ("ai_sdk", "Let me see."), ("vercel", "Let me see."), ("langchain", ""), ("ollama", "")],
)
def test_a_client_uses_its_tools_and_gets_what_its_schema_says(
    caller: str, server: str, client: str, streamed: str
) -> None:
    """`streamed`: what a client repeats of the answers before the last one."""
    found = json.loads(node(str(_PROGRAMS / f"{client}.js"), caller, server, *TEXTS))
    assert found["asked"] == ["Rome", "Oslo"] * 2, "not the calls of an answer, then those of a stream"
    assert (found["whole"], found["streamed"]) == ("It is sunny.", f"{streamed}It is sunny.")
    assert found["output"]["name"] in ("Ann", "Bob") and 1 <= found["output"]["age"] <= 9
    if client in ("ai_sdk", "vercel", "langchain"):
        assert found["told"] == PEOPLE, "its schema limits neither field"
    if client == "ai_sdk":
        assert found["reasoning"] == "The user wants weather." and found["tokens"] > 0
    if client == "ollama":
        assert (found["capabilities"], found["refused"], found["version"]) == (["completion", "tools"], 404, "0.12.11")


@pytest.mark.skipif(not (_PROGRAMS / "node_modules").is_dir(), reason="npm has installed nothing here")
def test_anthropics_client_calls_tools_and_reads_a_stream(caller: str) -> None:
    found = json.loads(node(str(_PROGRAMS / "anthropic_sdk.js"), caller))
    assert found["asked"] == ["Rome", "Oslo"]
    assert found["last"] == [{"type": "text", "text": "It is sunny."}] and found["reason"] == "end_turn"
    assert found["streamed"] == ["thinking", "text", "tool_use", "tool_use"]
    assert found["counted"] == found["prompt"] > 0
    assert found["model"] == "caller"
    assert found["error"] == "NotFoundError" and found["type"] == "not_found_error"
