"""Two mock engines behind routers of other projects (`.venv-routers`), 200 requests/s, one engine killed meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

import aiohttp
import pytest

from tests.mock import ROUND_VARIABLE

pytestmark = pytest.mark.mock

_BIN = Path(__file__).parents[2] / ".venv-routers" / "bin"
_ROUTERS: dict[str, list[str | Path]] = {
    "vllm-router": [_BIN / "vllm-router"],
    "sglang-router": [_BIN / "python", "-m", "sglang_router.launch_router"],
}
_RATE, _SECONDS = 200, 6
_PATIENCE_S = 60
_DICE = Random(1)
_HEADS = [" ".join(_DICE.choices(("stone", "river", "lamp", "cloud", "paper", "winter"), k=60)) for _ in range(1000)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(*command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, ROUND_VARIABLE: "5"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def body(prompt: str) -> dict[str, object]:
    return {"model": "smollm2", "prompt": prompt, "max_tokens": 4}


def wait_until_answered(url: str) -> None:
    """A router answers before it knows its workers, with an error."""
    deadline = time.monotonic() + _PATIENCE_S
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body("a")).encode(), headers)
    while True:
        try:
            urllib.request.urlopen(request, timeout=10).close()
            return
        except OSError:  # HTTPError is one
            assert time.monotonic() < deadline, f"{url} does not answer"
            time.sleep(0.2)


async def load(url: str, doomed: subprocess.Popen[bytes]) -> Counter[str]:
    """The ends of all requests. `doomed` is killed at half time."""
    ends: Counter[str] = Counter()

    async def ask(session: aiohttp.ClientSession, number: int) -> None:
        prompt = f"{_DICE.choice(_HEADS)} question {number}"
        try:
            async with session.post(f"{url}/v1/completions", json=body(prompt)) as answer:
                found = await answer.json(content_type=None)
                whole = answer.status == 200 and found["usage"]["completion_tokens"] > 0
                ends["whole" if whole else f"{answer.status}: {found}"] += 1
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            ends[repr(error)] += 1

    timeout = aiohttp.ClientTimeout(_PATIENCE_S)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        began, asked = time.monotonic(), []
        for number in range(_RATE * _SECONDS):
            await asyncio.sleep(max(0.0, began + number / _RATE - time.monotonic()))
            if number == _RATE * _SECONDS // 2:
                doomed.send_signal(signal.SIGKILL)
            asked.append(asyncio.create_task(ask(session, number)))
        await asyncio.gather(*asked)
    return ends


@pytest.mark.parametrize("router", _ROUTERS)
def test_no_request_is_lost_when_one_of_two_engines_is_killed(router: str) -> None:
    engine = (sys.executable, "-m", "ssd.cli.main", "launch", "--load-format", "mock", "--max-num-seqs", "256")
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    with ExitStack() as held:
        engines = [held.enter_context(running(*engine, "--port", url.rpartition(":")[2])) for url in urls]
        for url in urls:
            wait_until_answered(url)
        port = str(free_port())
        where = ("--host", "127.0.0.1", "--port", port, "--prometheus-port", str(free_port()))
        held.enter_context(running(*_ROUTERS[router], *where, "--worker-urls", *urls, "--policy", "cache_aware"))
        wait_until_answered(f"http://127.0.0.1:{port}")
        assert asyncio.run(load(f"http://127.0.0.1:{port}", engines[0])) == {"whole": _RATE * _SECONDS}
