"""The socket on which HTTP listens: bound before any process starts, so that a port in use is known at once."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
from pathlib import Path

from ssd.config import Server
from ssd.errors import UsageError

_BACKLOG = 2048
_SEND_BYTES = 128 * 2**10  # of each connection: what lies in the system's buffers looks read (by default megabytes)


def listen(server: Server) -> socket.socket:
    """A listening socket on `server.uds`, or on its host and port. Raises UsageError."""
    try:
        listening = _unix(Path(server.uds)) if server.uds is not None else _tcp(server.host, server.port)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        listening.listen(_BACKLOG)
    except OSError as error:
        raise _refused(server.uds or f"{server.host}:{server.port}", error) from None
    listening.setblocking(False)
    return listening


def listen_for_nodes(host: str, port: int) -> socket.socket:
    """A blocking one for other nodes. Raises UsageError."""
    try:
        listening = _tcp(host, port)
        listening.listen(_BACKLOG)
    except OSError as error:
        raise _refused(f"{host}:{port}", error) from None
    return listening


def _refused(where: str, error: OSError) -> UsageError:
    return UsageError(f"cannot listen on {where}: {error.strerror or error}")


def url(listening: socket.socket) -> str:
    """Where a client finds it."""
    if listening.family == socket.AF_UNIX:
        return f"unix:{listening.getsockname()}"
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def close(listening: socket.socket) -> None:
    """Listen no more; a socket's file goes, too."""
    if listening.family == socket.AF_UNIX:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(listening.getsockname())
    listening.close()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _tcp(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return _bound(listening, address)


def _unix(path: Path) -> socket.socket:
    """For this user alone. A file that a dead server has left behind is taken over."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
    before = os.umask(0o177)
    try:
        return _bound(listening, str(path))
    finally:
        os.umask(before)


def _bound(listening: socket.socket, address: object) -> socket.socket:
    try:
        listening.bind(address)  # type: ignore[arg-type]  # what getaddrinfo gave, or a path
    except BaseException:
        listening.close()
        raise
    return listening
