"""Node's own clients. Skipped where there is no `node`."""

from __future__ import annotations

import shutil
import subprocess

import pytest

NODE = shutil.which("node")
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


def node(script: str, *arguments: str) -> str:
    """What a module prints; it must end well."""
    command = [str(NODE), "--input-type=module", "-e", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_a_body_that_is_too_large_has_an_answer(mock_server: str) -> None:
    assert node(_TOO_LARGE, mock_server).splitlines() == ["413 body_too_large"] * 2
