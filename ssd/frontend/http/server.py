"""uvicorn with the limits that it leaves open (RELIABILITY 3), in the frontend's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Callable, Iterator

import uvicorn

from ssd.errors import SsdError
from ssd.frontend.desk import Desk
from ssd.frontend.http.app import App
from ssd.frontend.http.connection import Connection

_KEEP_ALIVE_S = 30
_CLEAN_UP_S = 2  # what requests get to end after their connections


class Server:
    """HTTP on a listening socket, from `start` to `stop`; `broke` is called if it ends before that."""

    def __init__(self, desk: Desk, listening: socket.socket, broke: Callable[[SsdError], None]) -> None:
        config = uvicorn.Config(
            App(desk),
            http=functools.partial(Connection, limits=desk.config.server.limits),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        self._server = _Uvicorn(config)
        self._listening, self._broke = listening, broke
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Accept connections."""
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listening]))
        self._serving.add_done_callback(self._ended)
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.005)
        if self._serving.done():
            self._serving.result()

    async def stop(self, grace: float) -> None:
        """Let answers that are on their way arrive, for so many seconds."""
        assert self._serving is not None
        self._server.config.timeout_graceful_shutdown = round(grace) + _CLEAN_UP_S
        self._server.should_exit = True
        await asyncio.wait({self._serving}, timeout=grace)
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()  # their requests end as if the clients had left
        await self._serving

    def _ended(self, serving: asyncio.Task[None]) -> None:
        if not serving.cancelled() and not self._server.should_exit:
            self._broke(SsdError(f"HTTP stopped: {serving.exception()!r}"))


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the supervisor's."""
        yield
