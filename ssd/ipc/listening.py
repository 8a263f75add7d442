"""HTTP's listening socket and API keys, opened before any process starts, so that errors are known at once."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import ssl
import stat
from functools import lru_cache
from pathlib import Path

from ssd.config.engine import ServerConfig
from ssd.errors import UsageError
from ssd.system.files import read_bounded

_BACKLOG = 2048
_MOST_KEY_BYTES = 2**20
_MOST_PEM_BYTES = 2**20
_SEND_BYTES = 128 * 2**10  # per connection; bytes in the kernel's buffer look read (default: megabytes)


def listen(server: ServerConfig) -> socket.socket:
    """Return a non-blocking listening socket on `server.uds`, or on its host and port. Raises UsageError."""
    try:
        listening = _unix(Path(server.uds)) if server.uds is not None else tcp(server.host, server.port)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        listening.listen(_BACKLOG)
    except OSError as error:
        raise _refused(server.uds or f"{server.host}:{server.port}", error) from None
    listening.setblocking(False)
    return listening


def listen_for_ranks(host: str) -> socket.socket:
    """Return a blocking listening socket on a free port, for ranks on other machines. Raises UsageError."""
    try:
        listening = tcp(host, 0)
        listening.listen(_BACKLOG)
    except OSError as error:
        raise _refused(host, error) from None
    return listening


def _refused(where: str, error: OSError) -> UsageError:
    return UsageError(f"cannot listen on {where}: {error.strerror or error}")


def url(listening: socket.socket, tls: bool = False) -> str:
    if listening.family == socket.AF_UNIX:
        return f"unix:{listening.getsockname()}"
    host, port = listening.getsockname()[:2]
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def tls_context(server: ServerConfig) -> ssl.SSLContext | None:
    """Return a TLS context with the certificate and its key; None without a certificate. Raises UsageError."""
    if server.ssl_certfile is None:
        return None
    for option, path in (("--ssl-certfile", server.ssl_certfile), ("--ssl-keyfile", server.ssl_keyfile)):
        try:
            _ = None if path is None else read_bounded(Path(path), _MOST_PEM_BYTES)
        except UsageError as error:
            raise UsageError(f"{option}: {error}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile, password=lambda: "")
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        files = f"--ssl-certfile {server.ssl_certfile}"
        files += f" --ssl-keyfile {server.ssl_keyfile}" if server.ssl_keyfile is not None else ""
        no_pem = isinstance(error, ssl.SSLError) and "PEM" in str(error)
        cause = "no certificate with its key in PEM format" if no_pem else getattr(error, "strerror", None) or error
        raise UsageError(f"{files}: {cause}") from None
    return context


def close(listening: socket.socket) -> None:
    if listening.family == socket.AF_UNIX:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(listening.getsockname())
    listening.close()


@lru_cache(64)  # HTTP asks for every request
def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def tcp(host: str, port: int) -> socket.socket:
    """Bind a socket; `host` may be * as for libzmq. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        None if host == "*" else host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind, protocol)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return _bound(listening, address)


def _unix(path: Path) -> socket.socket:
    # Replaces a file that a dead server left behind.
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


def api_keys(server: ServerConfig) -> dict[bytes, str]:
    """Return all API keys, each with its name or "".

    Raises UsageError as `read_api_keys`, and for a key that no header can carry."""
    if not all(re.fullmatch(r"[!-~]{1,4096}", key) for key in server.api_keys):
        raise UsageError("--api-key: a key has printable ASCII characters, without spaces")
    from_file = read_api_keys(server.api_key_file) if server.api_key_file is not None else {}
    return from_file | {key: "" for name in server.api_keys if (key := name.encode()) not in from_file}


def read_api_keys(path: str) -> dict[bytes, str]:
    """Return the API keys in a file: on each line a key, then maybe a blank and a name for `--limits`.

    Raises UsageError if others can read it, if it has no keys, if a line is empty, or if a key has two names."""
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
    found: dict[bytes, str] = {}
    for number, (key, _, rest) in enumerate((line.partition(b" ") for line in keys), 1):
        name = rest.strip().decode(errors="replace")
        if found.setdefault(key, name) != name:
            raise UsageError(f"--api-key-file {path}: line {number} gives a key of an earlier line another name")
    return found
