"""CURVE: encrypted ZeroMQ between an engine and the clients on its list, for TCP."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
from zmq.auth import Authenticator

from ssd.errors import UsageError
from ssd.ipc import keys, sockets
from ssd.ipc.keys import KeyPair

log = logging.getLogger("ssd.curve")

CURVE_BYTES = 33
"""What encryption adds to a frame: a command name, a nonce, flags and an authenticator."""

_HANDSHAKE_MS = 5000
_DOMAIN = "ssd"


@dataclass(frozen=True)
class ClientKeys:
    """What a client needs: its own pair, and the public key of the engine it means."""

    own: KeyPair
    server: bytes

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Before `socket` connects."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.own.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.own.secret)


def client_keys(folder: Path) -> ClientKeys:
    """The keys in a folder that `ssd keys` has made for a client; raises UsageError for any other."""
    if keys.has_server(folder):
        raise UsageError(f"{folder} holds the engine's keys; a client's are in {folder}/clients/NAME")
    return ClientKeys(keys.load_pair(folder / "client.secret"), keys.load_public(folder / "server.pub"))


def secure_router(context: zmq.Context[Any], directory: Path) -> zmq.Socket[bytes]:
    """A ROUTER, not bound yet, that only clients on the list in `directory` (`ssd keys`) can talk to; at most one in a
    context.

    The list is read at each handshake, in a thread that ends with `context`. Raises UsageError for bad keys.
    """
    keys.check_server(directory)
    pair = keys.load_pair(directory / "server.secret")
    socket = sockets.public_router(context, sockets.PUBLIC_BYTES + CURVE_BYTES)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # else libzmq lets everybody in when nobody guards
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    sockets.notice_silence(socket)
    _guard(context, directory)
    return socket


def _guard(context: zmq.Context[Any], directory: Path) -> None:
    """Answer what libzmq asks about each handshake in `context`: is this client's key on the list?"""
    # A shadow, so that whoever destroys `context` does not close this thread's socket: it ends itself.
    authenticator = Authenticator(zmq.Context.shadow(context.underlying), log=log)
    authenticator.configure_curve_callback(_DOMAIN, _AllowList(directory))
    authenticator.start()
    threading.Thread(target=asyncio.run, args=(_answer(authenticator),), name="ssd-curve", daemon=True).start()


async def _answer(authenticator: Authenticator) -> None:
    """Alone in its thread and its event loop, which may block."""
    try:
        while True:
            await authenticator.handle_zap_message(authenticator.zap_socket.recv_multipart())
    except zmq.ContextTerminated:
        pass
    finally:
        authenticator.stop()


class _AllowList:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client may connect. Never raises: that would end the thread, and nobody could connect any more."""
        try:
            name = self._name(key)
        except OSError as error:  # the folder is gone, or no descriptor is left to read it
            log.warning("cannot read the list of clients: %s", error.strerror)
            return False
        if name is None:
            log.info("refused a client with the key %s", key.decode())
        else:
            log.info("client %s connects", name)
        return name is not None

    def _name(self, key: bytes) -> str | None:
        for name, path in keys.authorizations(self._directory):
            try:
                if keys.load_public(path) == key:
                    return name
            except UsageError as error:
                log.warning("%s", error)
        return None
