"""Results are never dropped, and never wait for ever."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import zmq

from ssd.errors import SsdError
from ssd.ipc import sockets
from ssd.ipc.messages import TARGET_TO_FRONTEND, Step


def test_a_result_waits_for_its_receiver_and_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"ipc://{tmp_path}/s"
    with zmq.Context() as context, sockets.router(context, address) as router:
        late = threading.Timer(0.05, lambda: peers.append(sockets.dealer(context, address, b"late")))
        peers: list[zmq.Socket[bytes]] = []
        late.start()
        sockets.deliver(router, Step([]), 3, b"late")
        late.join()
        assert peers[0].poll(5000)
        received = sockets.receive(peers[0], TARGET_TO_FRONTEND)
        assert received is not None and received[1:] == (3, Step([]))
        monkeypatch.setattr(sockets, "_PATIENCE_S", 0.05)
        with pytest.raises(SsdError, match="took no results"):
            sockets.deliver(router, Step([]), 3, b"never")
        peers[0].close()
