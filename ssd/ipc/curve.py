"""CURVE: encrypted ZeroMQ over TCP between an engine and the clients on its list."""

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
"""Bytes that encryption adds to a frame: a command name, a nonce, flags and an authenticator."""

_HANDSHAKE_MS = 5000
_DOMAIN = "ssd"


@dataclass(frozen=True)
class ClientKeys:
    """A client's own pair, and the public key of its engine."""

    own: KeyPair
    server: bytes

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.own.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.own.secret)


def client_keys(folder: Path) -> ClientKeys:
    """Load the keys that `ssd keys` has made for a client. Raises UsageError."""
    if keys.has_server(folder):
        raise UsageError(f"{folder} holds the engine's keys; a client's are in {folder}/clients/NAME")
    return ClientKeys(keys.load_pair(folder / "client.secret"), keys.load_public(folder / "server.pub"))


def secure_router(
    context: zmq.Context[Any], directory: Path, max_bytes: int = sockets.PUBLIC_BYTES
) -> zmq.Socket[bytes]:
    """Return an unbound ROUTER that admits only clients on the list in `directory`; at most one per context.

    A thread reads the list at each handshake and ends with `context`. Raises UsageError for bad keys."""
    keys.check_server(directory)
    pair = keys.load_pair(directory / "server.secret")
    socket = sockets.public_router(context, max_bytes + CURVE_BYTES)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # otherwise libzmq lets everybody in while no thread answers
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    sockets.notice_silence(socket)
    _guard(context, directory)
    return socket


def router_for_others(
    context: zmq.Context[Any], directory: str | None, max_bytes: int = sockets.PUBLIC_BYTES
) -> zmq.Socket[bytes]:
    """Return an unbound ROUTER for other machines: a `secure_router` if there is a `directory`, else open to all."""
    if directory is not None:
        return secure_router(context, Path(directory), max_bytes)
    router = sockets.public_router(context, max_bytes)
    sockets.notice_silence(router)
    return router


def _guard(context: zmq.Context[Any], directory: Path) -> None:
    # A shadow context: destroying `context` must not close this thread's socket, which ends by itself.
    authenticator = Authenticator(zmq.Context.shadow(context.underlying), log=log)
    authenticator.configure_curve_callback(_DOMAIN, _AllowList(directory))
    authenticator.start()
    threading.Thread(target=asyncio.run, args=(_answer(authenticator),), name="ssd-curve", daemon=True).start()


async def _answer(authenticator: Authenticator) -> None:
    try:
        while True:
            await authenticator.handle_zap_message(authenticator.zap_socket.recv_multipart())
    except zmq.ContextTerminated:
        pass
    finally:
        authenticator.stop()


def user_of(frame: zmq.Frame | None) -> str:
    try:
        return "" if frame is None else str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


def name_of(directory: Path, key: str) -> str | None:
    for name, path in keys.authorizations(directory):
        try:
            if keys.load_public(path).decode() == key:
                return name
        except UsageError as error:
            log.warning("%s", error)
    return None


class _AllowList:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def callback(self, domain: str, key: bytes) -> bool:
        """Return True if a client may connect. Never raise: that would end the thread and lock out all clients."""
        try:
            name = name_of(self._directory, key.decode())
        except OSError as error:  # the folder is gone, or no descriptor is left to read it
            log.warning("cannot read the list of clients: %s", error.strerror)
            return False
        if name is None:
            log.info("refused a client with the key %s", key.decode())
        else:
            log.info("client %s connects", name)
        return name is not None
