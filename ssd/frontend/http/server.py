"""HTTP on a listening socket: uvicorn's protocol (`connection.py`) without uvicorn's server.

`uvicorn.Server` counts connections only after all that wait are accepted, when no descriptor may be left for ZeroMQ. It
also takes the process's signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from email.utils import formatdate

import uvicorn
from uvicorn.server import ServerState

from ssd.frontend.connection_limits import http_connections
from ssd.frontend.http.app import App
from ssd.frontend.http.connection import Hangups, HttpConnection, as_bytes
from ssd.frontend.http.errors import refusal
from ssd.frontend.request_manager import RequestManager
from ssd.ipc.listening import tls_context

log = logging.getLogger("ssd.http")

_KEEP_ALIVE_S = 30
_CLEAN_UP_S = 2  # for requests to end after their connections
_OTHER_CONNECTIONS = 128  # idle ones, and those that ask for metrics
_AT_ONCE = 64  # connections accepted in one turn
_AGAIN_S = 0.5
_HEAD_BYTES = 65536
_HANDSHAKE_S = 10.0  # of TLS


class HttpServer:
    """The HTTP server on a listening socket, which it owns, from `start` to `stop`.

    Raises UsageError for too few descriptors, and for certificates or API keys that cannot be used."""

    def __init__(self, manager: RequestManager, listening: socket.socket) -> None:
        limits = manager.config.server.limits
        self._patience_s = limits.slow_reader_seconds
        self._most = http_connections(2 * limits.max_open_requests + _OTHER_CONNECTIONS)
        self._uvicorn = uvicorn.Config(
            App(manager, listening),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        self._state = ServerState()
        self._listening = listening
        self._tls = tls_context(manager.config.server)
        self._connections: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        self._loop = asyncio.get_running_loop()
        self._hangups = Hangups(self._loop)
        self._set_date()
        self._listen()

    async def stop(self, grace: float) -> None:
        """Give answers under way `grace` seconds to arrive, then end."""
        self._next_date.cancel()
        self._loop.remove_reader(self._listening)
        self._listening.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        await self._wait_for_all(grace)
        for connection in list(self._state.connections):
            connection.transport.abort()  # their requests end as if the clients had left
        await self._wait_for_all(_CLEAN_UP_S)

    async def _wait_for_all(self, seconds: float) -> None:
        connections: set[HttpConnection] = self._state.connections  # type: ignore[assignment]  # all are ours
        ends = [self._loop.create_task(connection.ended.wait()) for connection in connections]
        if ends or self._state.tasks:
            await asyncio.wait({*ends, *self._state.tasks}, timeout=seconds)

    def _set_date(self) -> None:
        self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        self._next_date = self._loop.call_later(1.0, self._set_date)

    # -- connections ------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        if self._listening.fileno() >= 0:  # not stopped meanwhile
            self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                client, _ = self._listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # the system has no descriptor or memory left
                log.warning("cannot accept connections: %s", error.strerror)
                self._loop.remove_reader(self._listening)
                self._loop.call_later(_AGAIN_S, self._listen)
                return
            client.setblocking(False)
            if len(self._connections) >= self._most:
                self._turn_away(client)
            else:
                connected = self._loop.create_task(self._serve(client))
                self._connections.add(connected)
                connected.add_done_callback(self._connections.discard)

    async def _serve(self, client: socket.socket) -> None:
        connection = HttpConnection(self._uvicorn, self._state, {}, patience_s=self._patience_s, hangups=self._hangups)
        try:
            seconds = None if self._tls is None else _HANDSHAKE_S
            await self._loop.connect_accepted_socket(
                lambda: connection, client, ssl=self._tls, ssl_handshake_timeout=seconds
            )
        except OSError:  # it is lost already
            client.close()
        else:
            await connection.ended.wait()

    def _turn_away(self, client: socket.socket) -> None:
        error = refusal("overloaded", f"{self._most} connections are open already")
        with client, contextlib.suppress(OSError):
            if self._tls is not None:
                return  # it could not read the answer
            client.send(as_bytes(error, {}))
            # Closing a socket with unread data resets the connection, and the answer is lost.
            client.recv(_HEAD_BYTES)
