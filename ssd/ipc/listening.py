"""HTTP's listening socket and API keys, opened before any process starts: errors are known at once."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
from pathlib import Path

from ssd.config.engine import ServerConfig
from ssd.errors import UsageError
from ssd.files import read_bounded

_BACKLOG = 2048
_MOST_KEY_BYTES = 2**20
_SEND_BYTES = 128 * 2**10  # a connection; what lies in the kernel's buffer looks read (default: megabytes)


def listen(server: ServerConfig) -> socket.socket:
    """Returns a non-blocking listening socket on `server.uds`, or on its host and port. Raises UsageError."""
    try:
        listening = _unix(Path(server.uds)) if server.uds is not None else _tcp(server.host, server.port)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        listening.listen(_BACKLOG)
    except OSError as error:
        raise _refused(server.uds or f"{server.host}:{server.port}", error) from None
    listening.setblocking(False)
    return listening


def listen_for_nodes(host: str, port: int) -> socket.socket:
    """Returns a blocking listening socket for other nodes. Raises UsageError."""
    try:
        listening = _tcp(host, port)
        listening.listen(_BACKLOG)
    except OSError as error:
        raise _refused(f"{host}:{port}", error) from None
    return listening


def _refused(where: str, error: OSError) -> UsageError:
    return UsageError(f"cannot listen on {where}: {error.strerror or error}")


def url(listening: socket.socket) -> str:
    """Returns where a client finds the socket."""
    if listening.family == socket.AF_UNIX:
        return f"unix:{listening.getsockname()}"
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def close(listening: socket.socket) -> None:
    """Closes the socket, and removes its file if it has one."""
    if listening.family == socket.AF_UNIX:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(listening.getsockname())
    listening.close()


def is_loopback(host: str) -> bool:
    """True if only this machine reaches `host`."""
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
    """Binds a socket for this user alone. Takes over a file that a dead server left behind."""
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


def read_api_keys(path: str) -> list[bytes]:
    """Returns the API keys in a file, one a line. Raises UsageError if others can read it or it has no keys."""
    file = Path(path)
    try:
        lines = read_bounded(file, _MOST_KEY_BYTES).splitlines()
        mode = file.stat().st_mode
    except (OSError, UsageError) as error:
        raise UsageError(f"--api-key-file: {error}") from None
    if mode & 0o077:
        raise UsageError(f"--api-key-file {path}: others may read it; chmod 600 it")
    keys = [line.strip() for line in lines]
    if not keys or not all(keys):
        raise UsageError(f"--api-key-file {path}: a key, on a line of its own, must not be empty")
    return keys
