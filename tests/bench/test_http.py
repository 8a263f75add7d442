"""Servers that do not answer as they should."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ssd.bench.http import Http
from ssd.config.params import SamplingDefaults, SamplingParams

PATIENCE_S = 20.0
Answering = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def server(answer: Answering, owner: str = "somebody") -> Iterator[str]:
    """The address of one that has a model of this owner, and answers every request so."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._begin()
            self.wfile.write(b'{"data": [{"id": "model", "owned_by": "%s"}]}' % owner.encode())

        def do_POST(self) -> None:
            self.body = self.rfile.read(int(self.headers["Content-Length"]))
            self._begin()
            answer(self)

        def _begin(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()
        thread.join()


@pytest.mark.parametrize(("end", "error"), [(b"", "broken_off"), (b"data: [DONE]\n\n", None)])
def test_a_stream_that_breaks_off_is_no_answer(end: bytes, error: str | None) -> None:
    async def ask(url: str) -> None:
        http = Http(url, 1, chat=False)
        for _ in range(2):  # a pass for each temperature
            async with http:
                answer = await http("x", SamplingParams())
            assert (answer.error, len(answer.arrivals)) == (error, 1)

    with server(lambda request: request.wfile.write(b'data: {"choices": [{"text": "a"}]}\n\n' + end) and None) as url:
        asyncio.run(ask(url))


@pytest.mark.parametrize("owner", ["ssd", "somebody"])
def test_a_server_does_not_sample_as_its_model_recommends(owner: str) -> None:
    asked: list[dict[str, Any]] = []

    def answer(request: Any) -> None:
        asked.append(json.loads(request.body))
        request.wfile.write(b"data: [DONE]\n\n")

    async def ask(url: str) -> None:
        async with Http(url, 1, chat=False) as http:
            await http("x", SamplingParams(temperature=0.5))

    with server(answer, owner) as url:
        asyncio.run(ask(url))
    said = {name: value for name, value in asked[0].items() if name in SamplingDefaults.__struct_fields__}
    penalties = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    more = {"top_k": 0, "min_p": 0.0, **penalties} if owner == "ssd" else {}
    assert said == {"temperature": 0.5, "top_p": 1.0, **more}


def test_answers_that_never_come_are_not_waited_for_in_the_end() -> None:
    asked, left = threading.Event(), threading.Event()

    def never(request: BaseHTTPRequestHandler) -> None:
        request.wfile.flush()
        asked.set()
        request.connection.settimeout(PATIENCE_S)
        if request.rfile.read(1) == b"":
            left.set()

    async def leave(url: str) -> None:
        async with Http(url, 1, chat=False) as http:
            waiting = asyncio.ensure_future(http("x", SamplingParams()))
            assert await asyncio.to_thread(asked.wait, PATIENCE_S)
            waiting.cancel()

    with server(never) as url:
        asyncio.run(leave(url))
        assert left.wait(PATIENCE_S)
