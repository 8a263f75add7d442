"""The frontend process: one event loop with the desk, its clients over ZeroMQ and HTTP, and the target behind it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from ssd.errors import SsdError, UsageError
from ssd.frontend import descriptors
from ssd.frontend.accepted import Guard
from ssd.frontend.desk import Desk
from ssd.frontend.gateway import Gateway
from ssd.frontend.inlet import Inlet
from ssd.frontend.log_line import LogLine
from ssd.frontend.reporting import Reporting
from ssd.ipc import sockets
from ssd.ipc.curve import secure_router
from ssd.ipc.messages import (
    TARGET_TO_FRONTEND,
    Hello,
    Message,
    Ready,
    Refused,
    Step,
)
from ssd.ipc.process import Child
from ssd.ipc.supervision import SUPERVISOR_TO_CHILD, Drain, Report, TargetLost, Watch

if TYPE_CHECKING:
    from ssd.frontend.http.server import Server

log = logging.getLogger("ssd.frontend")

_BEAT_S = 0.1
_GRACE_S = 1.0  # what results get to leave this process at the end
_STEPS = 8  # steps of the target in a turn: their tokens are on their way to clients before more are taken


def main(child: Child) -> None:
    descriptors.raise_limit()
    frontend = Frontend(child)
    run(frontend.serve())
    child.stopped()
    threading.Event().wait()  # the supervisor ends this process; an exit of its own would look like a crash


def run(serving: Any) -> None:
    """Run a coroutine in the fastest event loop there is."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(serving)
    else:
        uvloop.run(serving)


class Frontend:
    """`serve` answers clients until the supervisor asks to drain and every request has ended and left this process.

    HTTP answers from the start, and says that the model is loading; ZeroMQ clients are let in when the target is ready,
    so that whoever finds a connection finds an engine.
    """

    def __init__(self, child: Child) -> None:
        self._child = child
        self._config = child.config
        # The clients' side has its own context: ending it waits for the last results without ending the other sockets.
        self._clients: zmq.Context[Any] = zmq.Context()
        self._gateways: list[Gateway] = []
        self._connections = itertools.count()
        self._http: Server | None = None

    async def serve(self) -> None:
        """Raises SsdError when the target refuses this frontend, and when HTTP breaks."""
        loop = asyncio.get_running_loop()
        self._welcome: asyncio.Future[None] = loop.create_future()
        self._drained: asyncio.Future[None] = loop.create_future()
        self._beat()
        self.desk = Desk(self._config, self._child.epoch, self._send)
        self._guard = Guard(lambda: self.desk.budget.held)
        if self._child.start.http_fd >= 0:
            await self._open_http()
        await self.desk.load_tokenizer()
        self._connect()
        self._reporting = Reporting(self.desk, self._report)
        if log.isEnabledFor(logging.INFO):
            LogLine(self.desk)
        child, dropped = self._child, self.desk.dropped_frame
        self._supervisor = Inlet(child.supervisor, SUPERVISOR_TO_CHILD, self._command, 1, dropped)
        await asyncio.wait([self._welcome, self._drained], return_when=asyncio.FIRST_COMPLETED)
        if self._welcome.done():
            self._open_gateways()
            self._child.ready()
            self._supervisor.look()
        await self._drained
        await self._leave()
        self._target.close()
        self._supervisor.close()
        for gateway in self._gateways:
            gateway.close()
        self._guard.close()
        self._clients.destroy(linger=int(1000 * _GRACE_S))
        self.desk.close()

    async def _open_http(self) -> None:
        from ssd.frontend.http.server import Server

        self._http = Server(self.desk, socket.socket(fileno=self._child.start.http_fd), self._broke)
        await self._http.start()

    def _beat(self) -> None:
        self._child.beat()
        asyncio.get_running_loop().call_later(_BEAT_S, self._beat)

    def _connect(self) -> None:
        """To the target that runs now or comes next, and to no other: what waits on this connection dies with it.

        Under a new name: where a target still knows the connection before, it would hear nothing from one of the same.
        """
        identity = b"frontend-%d-%d" % (self._child.epoch, next(self._connections))
        self._engine = sockets.dealer(self._child.context, self._child.address(sockets.ENGINE), identity)
        self._target = Inlet(self._engine, TARGET_TO_FRONTEND, self._hear, _STEPS, self.desk.dropped_frame)
        self._send(Hello("frontend", self._config.vocab_size, self._config.digest))

    def _disconnect(self) -> None:
        self._target.close()
        self._engine.close(linger=0)

    def _open_gateways(self) -> None:
        self._open_gateway(sockets.public_router(self._clients), self._child.address(sockets.CLIENT))
        if self._config.server.zmq_bind is not None:
            self._open_gateway(self._router_for_others(), self._config.server.zmq_bind)

    def _router_for_others(self) -> zmq.Socket[bytes]:
        """For other machines: with keys, unless the configuration does without."""
        directory = self._config.server.zmq_keys
        if directory is not None:
            return secure_router(self._clients, Path(directory))
        router = sockets.public_router(self._clients)
        sockets.notice_silence(router)
        return router

    def _open_gateway(self, router: zmq.Socket[bytes], address: str) -> None:
        """Listen on `address`. The gateway is there before anybody can come, as it counts connections."""
        self._gateways.append(Gateway(self.desk, router, self._child.epoch, self._guard))
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            raise UsageError(f"cannot listen on {address}: {error.strerror}") from None

    def _send(self, message: Message) -> bool:
        sent = sockets.send(self._engine, message, self._child.epoch)
        self._target.look()
        return sent

    def _hear(self, peer: bytes, message: Ready | Refused | Step) -> None:
        if isinstance(message, Step):
            self.desk.step(message)
        elif isinstance(message, Refused):
            self._broke(SsdError(message.message))
        else:
            self.desk.target_back()
            if not self._welcome.done():
                self._welcome.set_result(None)

    def _report(self, report: Report) -> None:
        self._child.report(report)
        self._supervisor.look()

    def _command(self, peer: bytes, message: Drain | TargetLost | Watch) -> None:
        if isinstance(message, Watch):
            self._reporting.watch(message.seconds)
        elif isinstance(message, TargetLost):
            self._disconnect()
            self.desk.target_lost()
            self._connect()
        elif self.desk.state != "draining":
            self.desk.state = "draining"
            asyncio.get_running_loop().call_later(message.seconds, self._end)
            self._watch()

    # -- the end ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Look every few milliseconds whether everything has ended and left."""
        if self.desk.open_requests or any(gateway.busy for gateway in self._gateways):
            asyncio.get_running_loop().call_later(0.01, self._watch)
        else:
            self._end()

    def _end(self) -> None:
        if not self._drained.done():
            self._drained.set_result(None)

    def _broke(self, cause: SsdError) -> None:
        if not self._drained.done():
            self._drained.set_exception(cause)

    async def _leave(self) -> None:
        """What is still open ends with what it has; then everyone gets a moment to be told."""
        self.desk.abort_all()
        deadline = asyncio.get_running_loop().time() + _GRACE_S
        while any(gateway.busy for gateway in self._gateways) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.005)
        if self._http is not None:
            await self._http.stop(_GRACE_S)
