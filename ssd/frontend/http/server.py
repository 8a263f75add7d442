"""Runs uvicorn's connections in the frontend's event loop, with the limits that uvicorn leaves open."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator

import uvicorn

from ssd.errors import SsdError
from ssd.frontend.connection_limits import http_connections
from ssd.frontend.http.app import App
from ssd.frontend.http.connection import Connection, Hangups, as_bytes
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
    """HTTP on a listening socket, from `start` to `stop`. `broke` is called if it ends before that.
    It accepts connections itself: uvicorn would count them only after the event loop has accepted all that wait,
    when no descriptor may be left. Raises UsageError where the process may have too few."""

    def __init__(self, manager: RequestManager, listening: socket.socket, broke: Callable[[SsdError], None]) -> None:
        self._limits = manager.config.server.limits
        self._most = http_connections(2 * self._limits.max_open_requests + _OTHER_CONNECTIONS)
        self._server = _Uvicorn(
            uvicorn.Config(
                App(manager, listening),
                ws="none",
                lifespan="off",
                loop="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )
        self._listening, self._broke = listening, broke
        self._tls = tls_context(manager.config.server)
        self._connections: set[asyncio.Task[None]] = set()
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Accepts connections from now on."""
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        self._serving = asyncio.create_task(self._server.serve(sockets=[]))
        self._serving.add_done_callback(self._ended)
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.005)
        if self._serving.done():
            self._serving.result()
        self._loop = asyncio.get_running_loop()
        self._hangups = Hangups(self._loop)
        self._listen()

    async def stop(self, grace: float) -> None:
        """Gives answers under way `grace` seconds to arrive, then ends."""
        assert self._serving is not None
        self._loop.remove_reader(self._listening)
        self._listening.close()
        self._server.config.timeout_graceful_shutdown = round(grace) + _CLEAN_UP_S
        self._server.should_exit = True
        await asyncio.wait({self._serving}, timeout=grace)
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()  # their requests end as if the clients had left
        await self._serving

    def _ended(self, serving: asyncio.Task[None]) -> None:
        if not serving.cancelled() and not self._server.should_exit:
            self._broke(SsdError(f"HTTP stopped: {serving.exception()!r}"))

    # -- connections ------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        if not self._server.should_exit:
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
        """Serves one connection until it is lost."""
        connection = Connection(
            self._server.config, self._server.server_state, {}, limits=self._limits, hangups=self._hangups
        )
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


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the supervisor."""
        yield
