"""Clients that do nothing wrong, in a process of their own: do others' attacks reach them?

`python -m tests.attacks.innocents SITE FRONTEND` (a `Site` as JSON, and a process id) keeps one stream open over HTTP
and one over ZeroMQ, and asks short questions all the time over both. Every token is compared with the mock's oracle.
For every line on its input it prints, as JSON, what each of the three has seen since the line before. It ends with its
input.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from ssd.client import Client
from ssd.config.params import SamplingParams
from ssd.errors import EngineDeadError, RequestError, SsdError
from tests.attacks.registry import Site
from tests.mock import oracle

ROOT = Path(__file__).parents[2]
_PATIENCE_S = 60.0
_PAUSE_S = 0.05
_SHORT = 12  # tokens
_BUSY = {"overloaded", "restarting", "loading"}


class Seen(msgspec.Struct):
    """`tokens` that came, how long the frontend computed at most without any (seconds of its processor time, so that
    other programs do not count), how often there was no room for a request, and what was wrong."""

    tokens: int
    stall_s: float
    refused: int
    problems: list[str]


class Innocents:
    """The process, for whoever attacks."""

    def __init__(self, site: Site, frontend: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.attacks.innocents", msgspec.json.encode(site).decode(), str(frontend)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )

    def seen(self) -> dict[str, Seen]:
        """What each has seen since the last time, after all have had a sign of life."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return msgspec.json.decode(self._process.stdout.readline(), type=dict[str, Seen])

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class _Watch:
    """Counts what one client gets of the process `frontend`, for another thread."""

    def __init__(self, frontend: int) -> None:
        self._lock = threading.Condition()
        self._clock = (~frontend << 3) | 2  # Linux has one of every process's processor time
        self._since = self._now()
        self._seen = Seen(0, 0.0, 0, [])

    def begin(self) -> None:
        """Something is asked: from now on an answer is waited for."""
        self._since = self._now()

    def got(self, tokens: int) -> None:
        with self._lock:
            self._seen.tokens += tokens
            self._count()
            self._lock.notify_all()

    def refused(self) -> None:
        with self._lock:
            self._seen.refused += 1
            self._count()
            self._lock.notify_all()

    def problem(self, what: str) -> None:
        with self._lock:
            self._seen.problems.append(what[:300])
            self._since = self._now()
            self._lock.notify_all()

    def taken(self) -> Seen:
        """What was seen, once there is something after now."""
        with self._lock:
            if not self._lock.wait(_PATIENCE_S):
                self._seen.problems.append("nothing comes any more")
            self._count()
            found, self._seen = self._seen, Seen(0, 0.0, 0, [])
            return found

    def _now(self) -> float:
        """The processor time of the frontend, 0 once it is gone."""
        with suppress(OSError):
            return time.clock_gettime(self._clock)
        return 0.0

    def _count(self) -> None:
        now = self._now()
        self._seen.stall_s = max(self._seen.stall_s, now - self._since)
        self._since = now


class _Wrong(Exception):
    """An answer that is not the oracle's, or a stream that broke."""


class _Asker:
    """Makes requests that are all different and knows their answers. `name` keeps those of different clients apart."""

    def __init__(self, site: Site, name: int, watch: _Watch) -> None:
        with Client(site.address) as client:
            about = client.describe()
        self.site, self.watch = site, watch
        self._vocab_size, self._context = about.vocab_size, about.max_model_len
        self._numbers = itertools.count(name << 32)

    def next(self, tokens: int | None) -> tuple[list[int], SamplingParams, Any]:
        """(prompt, parameters, answer); an answer without a number of tokens fills the context."""
        number = next(self._numbers)
        prompt = [number % self._vocab_size, 1, 2, 3]
        tokens = tokens or self._context - len(prompt)
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=tokens, ignore_eos=True)
        return prompt, params, oracle(prompt, params, self._vocab_size, self._context)

    def follow(self, chunks: Iterator[list[int]], answer: Any, tokens: int) -> None:
        """Compare what comes with what must come."""
        position = 0
        for ids in chunks:
            for token in ids:
                if token != answer.token(position):
                    raise _Wrong(f"token {position} is {token}, not {answer.token(position)}")
                position += 1
            if ids:
                self.watch.got(len(ids))
        if position != tokens:
            raise _Wrong(f"a stream of {tokens} tokens ended after {position}")


def _http_stream(asker: _Asker, connection: http.client.HTTPConnection, tokens: int | None) -> None:
    prompt, params, answer = asker.next(tokens)
    body = {
        "model": asker.site.model,
        "prompt": prompt,
        "seed": params.seed,
        "max_tokens": params.max_tokens,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    fields = {"content-type": "application/json"}
    if asker.site.api_key:
        fields["authorization"] = f"Bearer {asker.site.api_key}"
    connection.request("POST", "/v1/completions", json.dumps(body), fields)
    response = connection.getresponse()
    if response.status in (429, 503):
        raise RequestError("overloaded", response.read().decode())
    if response.status != 200:
        raise _Wrong(f"status {response.status}: {response.read()[:200]!r}")
    asker.follow(_events(response), answer, params.max_tokens)


def _events(response: http.client.HTTPResponse) -> Iterator[list[int]]:
    """The tokens of each event. Raises _Wrong for an error among them."""
    for line in response:
        if not line.startswith(b"data: ") or line == b"data: [DONE]\n":
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise _Wrong(f"the stream ended with {event['error']}")
        for choice in event["choices"]:
            yield choice.get("token_ids") or []


def _zeromq_stream(asker: _Asker, client: Client, tokens: int | None) -> None:
    prompt, params, answer = asker.next(tokens)
    stream = client.stream(prompt, params, timeout=None if tokens is None else _PATIENCE_S)
    asker.follow((chunk.token_ids for chunk in stream), answer, params.max_tokens)


def _go_on(watch: _Watch, ask: Callable[[], None], reconnect: Callable[[], None]) -> None:
    """Ask again and again, whatever comes of it."""
    while True:
        watch.begin()
        try:
            ask()
        except RequestError as error:
            if error.code in _BUSY:
                watch.refused()
            else:
                watch.problem(f"{error.code}: {error}")
        except (_Wrong, EngineDeadError, OSError, ValueError, http.client.HTTPException) as error:
            watch.problem(f"{type(error).__name__}: {error}")
            reconnect()
        time.sleep(_PAUSE_S)


def _over_http(site: Site, watch: _Watch) -> None:
    asker = _Asker(site, 1, watch)
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=_PATIENCE_S)
    _go_on(watch, lambda: _http_stream(asker, connection, None), connection.close)


def _over_zeromq(site: Site, watch: _Watch) -> None:
    asker = _Asker(site, 2, watch)
    client = Client(site.tcp, keys=Path(site.keys) / "clients" / "innocent") if site.tcp else Client(site.address)
    _go_on(watch, lambda: _zeromq_stream(asker, client, None), lambda: None)


def _shortly(site: Site, watch: _Watch) -> None:
    """One question over each, in turn."""
    asker = _Asker(site, 3, watch)
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=_PATIENCE_S)
    client = Client(site.address)

    def ask() -> None:
        _http_stream(asker, connection, _SHORT)
        watch.begin()
        _zeromq_stream(asker, client, _SHORT)

    _go_on(watch, ask, connection.close)


_CLIENTS = {"http": _over_http, "zeromq": _over_zeromq, "short": _shortly}


def main() -> None:
    site = msgspec.json.decode(sys.argv[1], type=Site)
    watches = {name: _Watch(int(sys.argv[2])) for name in _CLIENTS}
    for name, client in _CLIENTS.items():
        threading.Thread(target=_kept, args=(client, site, watches[name]), daemon=True).start()
    for _ in sys.stdin:
        print(json.dumps({name: msgspec.to_builtins(watch.taken()) for name, watch in watches.items()}), flush=True)
    os._exit(0)  # threads wait in sockets


def _kept(client: Callable[[Site, _Watch], None], site: Site, watch: _Watch) -> None:
    """Even where it cannot begin, as while the engine is replaced."""
    while True:
        try:
            client(site, watch)
        except SsdError as error:
            watch.problem(f"cannot begin: {error}")


if __name__ == "__main__":
    main()
