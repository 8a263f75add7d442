"""The frontend process: a `Gateway` for as long as the engine lives."""

from __future__ import annotations

import threading

from ssd.frontend.gateway import Gateway
from ssd.ipc.process import Child


def main(child: Child) -> None:
    gateway = Gateway(child)
    gateway.connect()
    child.ready()
    gateway.serve()
    child.stopped()
    threading.Event().wait()  # the supervisor ends this process; an exit of its own would look like a crash
