"""uvicorn with the limits that it leaves open (RELIABILITY 3), in the frontend's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http
import logging
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ssd.config import Limits
from ssd.frontend.desk import Desk
from ssd.frontend.http.app import App
from ssd.frontend.http.exchange import HttpError, encoder, error_object

_HEAD_S = 10.0  # for the first head of a connection, and for any head that has begun
_KEEP_ALIVE_S = 30
_OTHER_CONNECTIONS = 128  # that are idle, or ask for metrics
_HEAD_TOO_LARGE = "the headers of this request are larger, or more, than this server takes"
_REFUSAL = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"


class Server:
    """HTTP on a listening socket, from `start` to `stop`."""

    def __init__(self, desk: Desk, listening: socket.socket) -> None:
        limits = desk.config.server.limits
        config = uvicorn.Config(
            App(desk),
            http=functools.partial(_Protocol, limits=limits),  # type: ignore[arg-type]  # any factory will do
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=2 * limits.max_open_requests + _OTHER_CONNECTIONS,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        self._server = _Uvicorn(config)
        self._listening = listening
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Accept connections."""
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listening]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.005)
        if self._serving.done():
            self._serving.result()

    async def stop(self, grace: float) -> None:
        """Let answers that are on their way arrive, for so many seconds."""
        assert self._serving is not None
        self._server.config.timeout_graceful_shutdown = max(1, round(grace))
        self._server.should_exit = True
        await self._serving


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the supervisor's."""
        yield


class _Protocol(HttpToolsProtocol):
    """Heads are limited in bytes, lines and seconds, and a client that takes nothing is let go."""

    def __init__(self, *arguments: Any, limits: Limits, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._limits = limits
        self._in_head, self._head_bytes, self._refused = True, 0, False
        self._head_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(_HEAD_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._reader_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > self._limits.max_header_bytes:
            self._refuse(431, _HEAD_TOO_LARGE, "headers_too_large")

    def on_message_begin(self) -> None:
        self._in_head = True
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(_HEAD_S, self.transport.abort)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        size = sum(len(name) + len(value) + 4 for name, value in self.headers)
        if len(self.headers) > self._limits.max_header_lines or size > self._limits.max_header_bytes:
            self._refuse(431, _HEAD_TOO_LARGE, "headers_too_large")
            raise ValueError  # ends the parsing
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        if not self._refused:
            self._refuse(400, "this is no valid HTTP request", "invalid_http")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader_timer = self.loop.call_later(self._limits.slow_reader_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _refuse(self, status: int, message: str, code: str) -> None:
        self._refused = True
        body = encoder.encode(error_object(HttpError(status, message, code)))
        phrase = http.HTTPStatus(status).phrase.encode()
        self.transport.write(_REFUSAL % (status, phrase, len(body), body))
        self.transport.close()
