"""The frontend process: one event loop with the request manager, its clients and the target's socket."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import socket
import threading
from typing import TYPE_CHECKING, Any

import uvloop
import zmq

from ssd.errors import UsageError
from ssd.frontend.connection_limits import ConnectionGuard
from ssd.frontend.gateway import Gateway
from ssd.frontend.reporting import LogLine, Reporting
from ssd.frontend.request_manager import RequestManager
from ssd.frontend.socket_reader import SocketReader
from ssd.ipc import messages, sockets
from ssd.ipc.curve import router_for_others
from ssd.ipc.messages import Drain, FrontendReport, Hello, Ready, Step, TargetLost, Watch
from ssd.ipc.peer_connections import raise_descriptor_limit
from ssd.ipc.process import Child
from ssd.ipc.public import Message

if TYPE_CHECKING:
    from ssd.frontend.http.server import HttpServer
    from ssd.frontend.tracing import Tracing

log = logging.getLogger("ssd.frontend")

_BEAT_S = 0.1
_GRACE_S = 1.0  # for results to leave this process at the end
_STEPS = 8  # steps of the target read in a turn; their tokens go out before more are read


def main(child: Child) -> None:
    raise_descriptor_limit()
    frontend = Frontend(child)
    uvloop.run(frontend.serve())
    child.stopped()
    threading.Event().wait()  # the supervisor ends this process; an exit of its own would look like a crash


class Frontend:
    """Owns the sockets and the request manager; serves clients until it is drained.

    HTTP answers from the start. ZeroMQ clients are let in when the target is ready: a connection means a working
    engine."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._config = child.config
        # Clients have a context of their own: ending it waits for the last results, while the other sockets stay open.
        self._clients: zmq.Context[Any] = zmq.Context()
        self._gateways: list[Gateway] = []
        self._connections = itertools.count()
        self._http: HttpServer | None = None

    async def serve(self) -> None:
        """Serve until drained. Raises SsdError when the target refuses this frontend."""
        loop = asyncio.get_running_loop()
        self._welcome: asyncio.Future[None] = loop.create_future()
        self._drained: asyncio.Future[None] = loop.create_future()
        self._beat()
        self.manager = RequestManager(self._config, self._child.epoch, self._send)
        self.manager.kernels = self._child.start.kernels
        self._guard = ConnectionGuard(lambda: self.manager.budget.held)
        if self._child.start.http_fd >= 0:
            self._open_http()
        tracing = self._tracing()
        await self.manager.texts.load()
        gc.freeze()  # garbage collection skips what lasts: modules, routes, the vocabulary
        self._connect()
        self._reporting = Reporting(self.manager, self._report)
        if log.isEnabledFor(logging.INFO):
            LogLine(self.manager)
        child, dropped = self._child, self.manager.dropped_frame
        self._supervisor = SocketReader(child.supervisor, messages.SUPERVISOR_TO_CHILD, self._command, 1, dropped)
        await asyncio.wait([self._welcome, self._drained], return_when=asyncio.FIRST_COMPLETED)
        if self._welcome.done():
            self._open_gateway(sockets.public_router(self._clients), self._child.address(sockets.CLIENT))
            if self._config.server.zmq_bind is not None:
                router = router_for_others(self._clients, self._config.server.zmq_keys)
                self._open_gateway(router, self._config.server.zmq_bind)
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
        self.manager.texts.close()
        if tracing is not None:
            tracing.close()

    def _open_http(self) -> None:
        from ssd.frontend.http.server import HttpServer

        self._http = HttpServer(self.manager, socket.socket(fileno=self._child.start.http_fd))
        self._http.start()

    def _tracing(self) -> Tracing | None:
        endpoint = self._config.server.otlp_traces_endpoint
        if endpoint is None:
            return None
        from ssd.frontend.tracing import Tracing

        return Tracing(self.manager, endpoint)

    def _beat(self) -> None:
        self._child.beat()
        asyncio.get_running_loop().call_later(_BEAT_S, self._beat)

    def _connect(self) -> None:
        # Each connection has a new name: a target that still knows the old one would not answer a second one of that
        # name.
        identity = b"frontend-%d-%d" % (self._child.epoch, next(self._connections))
        self._engine = sockets.dealer(self._child.context, self._child.address(sockets.ENGINE), identity)
        dropped = self.manager.dropped_frame
        self._target = SocketReader(self._engine, messages.TARGET_TO_FRONTEND, self._hear, _STEPS, dropped)
        self._send(Hello("frontend"))

    def _open_gateway(self, router: zmq.Socket[bytes], address: str) -> None:
        # Before the bind, because the gateway counts connections from the start.
        self._gateways.append(Gateway(self.manager, router, self._child.epoch, self._guard))
        try:
            router.bind(address)
        except zmq.ZMQError as error:
            raise UsageError(f"cannot listen on {address}: {error.strerror}") from None

    def _send(self, message: Message) -> bool:
        sent = sockets.send(self._engine, message, self._child.epoch)
        self._target.look()
        return sent

    def _hear(self, peer: bytes, message: Ready | Step) -> None:
        if isinstance(message, Step):
            self.manager.step(message)
        else:
            self.manager.target_back()
            if not self._welcome.done():
                self._welcome.set_result(None)

    def _report(self, report: FrontendReport) -> None:
        self._child.report(report)
        self._supervisor.look()

    def _command(self, peer: bytes, message: Drain | TargetLost | Watch) -> None:
        if isinstance(message, Watch):
            self._reporting.watch(message.seconds)
        elif isinstance(message, TargetLost):
            self._target.close()
            self._engine.close(linger=0)
            self.manager.target_lost()
            self._connect()
        elif self.manager.state != "draining":
            self.manager.state = "draining"
            asyncio.get_running_loop().call_later(message.seconds, self._end)
            self._watch()

    # -- the end ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self.manager.open_requests or any(gateway.busy for gateway in self._gateways):
            asyncio.get_running_loop().call_later(0.01, self._watch)
        else:
            self._end()

    def _end(self) -> None:
        if not self._drained.done():
            self._drained.set_result(None)

    async def _leave(self) -> None:
        self.manager.abort_all()
        deadline = asyncio.get_running_loop().time() + _GRACE_S
        while any(gateway.busy for gateway in self._gateways) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.005)
        if self._http is not None:
            await self._http.stop(_GRACE_S)
