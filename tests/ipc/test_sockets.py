"""Results are never dropped, and never wait for ever; no socket is without its limits."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import zmq

from ssd.errors import SsdError
from ssd.ipc import keys, sockets
from ssd.ipc.connection import Connection
from ssd.ipc.curve import client_keys, secure_router
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


def test_every_socket_has_its_limits(tmp_path: Path) -> None:
    keys.new_server(tmp_path / "keys")
    own = client_keys(keys.new_client(tmp_path / "keys", "laptop"))
    internal, public, results, at_once = sockets.INTERNAL_BYTES, sockets.PUBLIC_BYTES, 1000, 0
    made: list[tuple[zmq.Socket[bytes], int, int]] = []
    with zmq.Context() as context:
        made.append((sockets.router(context, f"ipc://{tmp_path}/r"), internal, results))
        made.append((sockets.router(context, f"ipc://{tmp_path}/p", public), public, results))
        made.append((over_tcp := sockets.router(context, "tcp://127.0.0.1:*", public), public, results))
        made.append((secure := secure_router(context, "tcp://127.0.0.1:*", tmp_path / "keys"), public + 33, results))
        made.append((sockets.dealer(context, f"ipc://{tmp_path}/r"), internal, at_once))
        address = secure.getsockopt_string(zmq.LAST_ENDPOINT)
        connections = [Connection(address, own), Connection(f"ipc://{tmp_path}/p")]
        made += [(connection._socket, internal + 33, at_once) for connection in connections]
        for socket, bytes_, linger in made:
            assert socket.getsockopt(zmq.SNDHWM) == socket.getsockopt(zmq.RCVHWM) == sockets.HIGH_WATER_MARK
            assert (socket.getsockopt(zmq.MAXMSGSIZE), socket.getsockopt(zmq.LINGER)) == (bytes_, linger)
        for socket in (over_tcp, secure, connections[0]._socket):
            assert socket.getsockopt(zmq.HEARTBEAT_IVL) == 15_000
            assert socket.getsockopt(zmq.HEARTBEAT_TIMEOUT) == 60_000
        for connection in connections:
            connection.close()
        context.destroy(linger=0)
