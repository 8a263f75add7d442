"""uvicorn's connections in the frontend's event loop, with the limits that it leaves open (RELIABILITY 3)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator

import uvicorn

from ssd.errors import SsdError
from ssd.frontend import descriptors
from ssd.frontend.desk import Desk
from ssd.frontend.http.app import App
from ssd.frontend.http.connection import Connection, Hangups, as_bytes
from ssd.frontend.http.errors import refusal

log = logging.getLogger("ssd.http")

_KEEP_ALIVE_S = 30
_CLEAN_UP_S = 2  # what requests get to end after their connections
_OTHER_CONNECTIONS = 128  # that are idle, or ask for metrics
_AT_ONCE = 64  # connections that are accepted before anything else is done
_AGAIN_S = 0.5
_HEAD_BYTES = 65536


class Server:
    """HTTP on a listening socket, from `start` to `stop`; `broke` is called if it ends before that.

    It accepts connections itself: uvicorn would know of them only after the event loop has accepted all that wait, when
    the process may have no descriptor left. Raises UsageError where it may have too few.
    """

    def __init__(self, desk: Desk, listening: socket.socket, broke: Callable[[SsdError], None]) -> None:
        self._limits = desk.config.server.limits
        self._most = descriptors.for_connections(2 * self._limits.max_open_requests + _OTHER_CONNECTIONS)
        self._server = _Uvicorn(
            uvicorn.Config(
                App(desk, listening),
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
        self._connections: set[asyncio.Task[None]] = set()
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Accept connections."""
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
        """Let answers that are on their way arrive, for so many seconds."""
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
        """Until the connection is lost."""
        connection = Connection(
            self._server.config, self._server.server_state, {}, limits=self._limits, hangups=self._hangups
        )
        try:
            await self._loop.connect_accepted_socket(lambda: connection, client)
        except OSError:  # it is lost already
            client.close()
        else:
            await connection.ended.wait()

    def _turn_away(self, client: socket.socket) -> None:
        error = refusal("overloaded", f"{self._most} connections are open already")
        with client, contextlib.suppress(OSError):
            client.send(as_bytes(error, {}))
            # What is unread when a socket closes resets the connection, and with it the answer.
            client.recv(_HEAD_BYTES)


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the supervisor's."""
        yield
