"""The key folder: made for its owner's eyes, and refused where others have been let in."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq
from zmq.auth import load_certificate

from ssd.errors import UsageError
from ssd.ipc import keys
from ssd.ipc.curve import client_keys, secure_router


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "keys"
    before = os.umask(0)
    try:
        keys.new_server(directory)
        keys.new_client(directory, "laptop")
    finally:
        os.umask(before)
    return directory


def test_everything_is_for_its_owner_alone_whatever_the_umask(directory: Path) -> None:
    secrets = [path for path in directory.rglob("*.secret")]
    assert len(secrets) == 2
    for path in secrets:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in (directory, directory / "clients/laptop"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_the_files_are_zeromq_certificates_that_belong_together(directory: Path) -> None:
    for name in ("server", "clients/laptop/client"):
        public, secret = load_certificate(directory / f"{name}.secret")
        assert secret is not None and zmq.curve_public(secret) == public
    assert load_certificate(directory / "server.pub")[1] is None
    client = client_keys(directory / "clients/laptop")
    assert client.server == keys.load_public(directory / "server.pub")
    ((name, path),) = keys.authorizations(directory)
    assert (name, keys.load_public(path)) == ("laptop", client.own.public)
    assert client.own.secret.decode() not in repr(client)


def test_nothing_is_overwritten(directory: Path) -> None:
    with pytest.raises(UsageError, match=r"server\.secret"):
        keys.new_server(directory)
    with pytest.raises(UsageError, match="'laptop' has keys"):
        keys.new_client(directory, "laptop")


@pytest.mark.parametrize("name", ["", "..", "a/b", "-x", "a b", "x" * 65])
def test_names_that_are_no_file_names_are_refused(directory: Path, name: str) -> None:
    with pytest.raises(UsageError, match="no name for a client"):
        keys.new_client(directory, name)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_secret_that_others_may_read_is_refused(directory: Path, mode: int) -> None:
    for path in directory.rglob("*.secret"):
        path.chmod(mode)
    with pytest.raises(UsageError, match=r"others may read: chmod 600 .*client\.secret"):
        client_keys(directory / "clients/laptop")
    with pytest.raises(UsageError, match=r"others may read: chmod 600 .*server\.secret"):
        secure_router(zmq.Context.instance(), directory)


def test_a_folder_without_the_right_keys_is_refused(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a client's are in"):
        client_keys(directory)
    with pytest.raises(UsageError, match=r"client\.secret holds no CURVE key, or cannot be read"):
        client_keys(tmp_path)
    with pytest.raises(UsageError, match="make them: ssd keys new"):
        secure_router(zmq.Context.instance(), tmp_path)
    for text in ("", 'public-key = "short"', f'public-key = "{"é" * 40}"', f'public-key = "{"#" * 40}"'):
        (directory / "server.pub").write_text(text)
        with pytest.raises(UsageError, match=r"server\.pub holds no CURVE key"):
            keys.load_public(directory / "server.pub")
    (directory / "clients/laptop/client.secret").write_text((directory / "authorized/laptop.pub").read_text())
    with pytest.raises(UsageError, match=r"client\.secret holds no CURVE key"):
        keys.load_pair(directory / "clients/laptop/client.secret")


def test_a_key_that_is_a_pipe_or_endless_is_refused_at_once(directory: Path) -> None:
    """The thread that lets clients in would wait for it, and nobody could connect any more."""
    path = directory / "authorized" / "pipe.pub"
    os.mkfifo(path)
    with pytest.raises(UsageError, match="holds no CURVE key"):
        keys.load_public(path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(UsageError, match="holds no CURVE key"):
        keys.load_public(path)


def test_a_folder_in_which_others_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    with pytest.raises(UsageError, match="chmod go-w"):
        keys.new_server(tmp_path)
    assert not any(tmp_path.iterdir())
    tmp_path.chmod(0o755)
    keys.new_server(tmp_path)


def test_a_public_half_that_was_never_written_is_made_for_the_next_client(directory: Path) -> None:
    public = (directory / "server.pub").read_text()
    (directory / "server.pub").unlink()
    folder = keys.new_client(directory, "phone")
    assert (directory / "server.pub").read_text() == (folder / "server.pub").read_text() == public
