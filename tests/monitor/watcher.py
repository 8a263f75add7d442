"""A watcher of an engine that reads its snapshots as they are."""

from __future__ import annotations

from typing import Any

import zmq

from ssd.ipc import sockets
from ssd.launch.supervisor import Engine
from ssd.monitor.messages import SNAPSHOTS, Snapshot


class Watcher:
    def __init__(self, engine: Engine) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        directory = engine.address.rpartition("/")[0]
        self._socket = sockets.subscriber(self._context, f"{directory}/{sockets.TELEMETRY}")

    def receive(self, timeout: float) -> Snapshot | None:
        """Return the next snapshot, or None after `timeout` seconds."""
        if not self._socket.poll(int(1000 * timeout)):
            return None
        received = sockets.receive(self._socket, SNAPSHOTS)
        return None if received is None else received[2]

    def close(self) -> None:
        self._context.destroy(linger=0)
