"""The folder of CURVE keys behind `ssd keys`, in ZeroMQ's certificate format.

    DIR/server.secret         the engine's pair
    DIR/server.pub            its public half
    DIR/authorized/NAME.pub   the clients that may connect; removing the file shuts one out
    DIR/clients/NAME/         all that client NAME needs (client.secret, server.pub): bring it there

A client that makes its own pair needs `server.pub`, and its public half goes into `authorized`."""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth import load_certificate
from zmq.utils import z85

from ssd.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_KEY_BYTES, _MOST_BYTES = 32, 2**16


@dataclass(frozen=True)
class KeyPair:
    """A CURVE pair. Each key is 40 characters of Z85."""

    public: bytes
    secret: bytes = field(repr=False)


def new_server(directory: Path) -> None:
    """Make the engine's pair in `directory`.

    Raises UsageError if there is one already, or if others may write there."""
    _create_folder(directory)
    if directory.stat().st_mode & 0o022:
        raise UsageError(f"others may write to {directory}, and so let clients in: chmod go-w {directory}")
    (directory / "authorized").mkdir(mode=0o700, exist_ok=True)
    _write_pair(directory / "server.secret", directory / "server.pub")


def has_server(directory: Path) -> bool:
    return (directory / "server.secret").exists()


def check_server(directory: Path) -> None:
    if not has_server(directory):
        raise UsageError(f"{directory} holds no keys of an engine; make them: ssd keys new {directory}")


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name for a client: give letters, digits, - and _, at most 64")


def new_client(directory: Path, name: str) -> Path:
    """Make a pair for client `name`, authorize it and return the folder that the client needs.

    Raises UsageError for a name that is taken or invalid."""
    check_name(name)
    server = _server_public(directory)
    folder = directory / "clients" / name
    if folder.exists() or _authorization(directory, name).exists():
        raise UsageError(f"client {name!r} has keys in {directory} already")
    _create_folder(folder)
    _write(folder / "server.pub", _certificate(server))
    _write_pair(folder / "client.secret", _authorization(directory, name))
    return folder


def _server_public(directory: Path) -> bytes:
    path = directory / "server.pub"
    if not path.exists() and has_server(directory):
        _write(path, _certificate(load_pair(directory / "server.secret").public))
    return load_public(path)


def authorizations(directory: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted((directory / "authorized").glob("*.pub")):
        yield path.stem, path


def load_public(path: Path) -> bytes:
    """Return the public key in `path`. Raises UsageError if there is none."""
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode) or about.st_size > _MOST_BYTES:  # others could block, or never end
            raise ValueError
        public, _ = load_certificate(path)
    except (OSError, ValueError):
        raise UsageError(f"{path} holds no CURVE key, or cannot be read") from None
    return _checked(public, path)


def load_pair(path: Path) -> KeyPair:
    """Return the pair in `path`. Raises UsageError if there is none, or if others may read it."""
    public = load_public(path)
    if path.stat().st_mode & 0o077:
        raise UsageError(f"{path} holds a secret that others may read: chmod 600 {path}")
    _, secret = load_certificate(path)
    return KeyPair(public, _checked(secret, path))


def _checked(key: bytes | None, path: Path) -> bytes:
    try:
        if key is not None and len(z85.decode(key)) == _KEY_BYTES:
            return key
    except (KeyError, ValueError, struct.error):
        pass
    raise UsageError(f"{path} holds no CURVE key")


def _authorization(directory: Path, name: str) -> Path:
    return directory / "authorized" / f"{name}.pub"


def _write_pair(secret_path: Path, public_path: Path) -> None:
    public, secret = zmq.curve_keypair()
    _write(secret_path, _certificate(public, secret))
    _write(public_path, _certificate(public))


def _certificate(public: bytes, secret: bytes | None = None) -> str:
    lines = ["curve", f'    public-key = "{public.decode()}"']
    if secret is not None:
        lines = ["# secret: for its owner alone", *lines, f'    secret-key = "{secret.decode()}"']
    return "\n".join(lines) + "\n"


def _create_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {folder}: {error.strerror}") from None


def _write(path: Path, text: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
