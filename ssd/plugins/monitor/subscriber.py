"""The watcher's side of monitoring: finds an engine, receives its snapshots, notices a loss."""

from __future__ import annotations

import logging
import time
from typing import Any

import zmq

from ssd.errors import UsageError
from ssd.ipc import sockets
from ssd.ipc.public import BadFrame
from ssd.ipc.running import IPC, address_of, running_engines
from ssd.monitor.messages import SNAPSHOTS, Snapshot

log = logging.getLogger("ssd.monitor")

_SILENCE_S = 1.5  # an engine publishes every tenth of a second


def only_engine(address: str | None) -> str:
    """Return the ZeroMQ address that `address` names, or that of the only running engine. Raises UsageError."""
    if address is not None:
        address = address_of(address)
        if not address.startswith(IPC):
            raise UsageError(f"{address!r} is no engine on this machine: give its URL, pid or ipc:// address")
        return address
    found = running_engines()
    if len(found) == 1:
        return found[0].address
    if not found:
        raise UsageError("no engine is running here; start one with ssd launch, or give its --address")
    raise UsageError("\n".join(["several engines are running; choose one with --address:", *map(str, found)]))


class Subscriber:
    """Receives the snapshots of one engine, at `address` or the only running one; for one thread, which must close it.

    `here` is False while none arrive. Without an `address`, it connects to another engine after a loss."""

    def __init__(self, address: str | None) -> None:
        self._wanted = address
        self._context: zmq.Context[Any] = zmq.Context()
        self._heard = time.monotonic()
        self.here = True
        self._connect(only_engine(address))

    def _connect(self, address: str) -> None:
        self.address = address
        directory = address.removeprefix(IPC).rpartition("/")[0]
        self._socket = sockets.subscriber(self._context, f"{IPC}{directory}/{sockets.TELEMETRY}")

    def receive(self, timeout: float) -> Snapshot | None:
        """Return the next snapshot, or None after `timeout` seconds or an invalid frame."""
        if self._socket.poll(max(0, int(1000 * timeout))):
            try:
                received = sockets.receive(self._socket, SNAPSHOTS)
            except BadFrame as error:
                log.warning("dropped a frame: %s", error)
                return None
            if received is not None:
                self._heard, self.here = time.monotonic(), True
                snapshot: Snapshot = received[2]
                return snapshot
        if time.monotonic() - self._heard > _SILENCE_S:
            self._lost()
        return None

    def _lost(self) -> None:
        self.here = False
        if self._wanted is None and len(found := running_engines()) == 1 and found[0].address != self.address:
            self._socket.close()
            self._connect(found[0].address)

    def close(self) -> None:
        self._context.destroy(linger=0)
