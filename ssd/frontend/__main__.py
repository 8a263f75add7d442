"""`python -m ssd.frontend FD`: started by the supervisor."""

from __future__ import annotations

import threading

from ssd.frontend.gateway import Gateway
from ssd.ipc.process import Child, run


def main(child: Child) -> None:
    gateway = Gateway(child)
    gateway.connect()
    child.ready()
    gateway.serve()
    child.stopped()
    threading.Event().wait()  # the supervisor ends this process; an exit of its own would look like a crash


if __name__ == "__main__":
    run(main)
