"""Commands that talk to a running engine over TCP, with keys."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssd.config.engine import ServerConfig
from ssd.ipc import keys
from tests.client.serving import echo
from tests.scripted_engine import engine_config, following, gateway_thread, scripted_engine


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Of an engine that wants keys, and says what it is told."""
    keys.new_server(tmp_path / "keys")
    keys.new_client(tmp_path / "keys", "laptop")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    server = ServerConfig(names=("scripted",), zmq_bind=address, zmq_keys=str(tmp_path / "keys"))
    with scripted_engine() as engine, gateway_thread(engine, engine_config(server=server)), following(engine, echo):
        yield address


def ssd(*arguments: str | Path, said: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ssd.cli.main", *map(str, arguments)]
    return subprocess.run(command, input=said, capture_output=True, text=True)


def test_generate_and_chat_reach_it_with_the_keys_of_a_client(address: str, tmp_path: Path) -> None:
    folder = tmp_path / "keys" / "clients" / "laptop"
    done = ssd("generate", "one two", "--raw", "--address", address, "--keys", folder)
    assert (done.returncode, done.stdout) == (0, "one two\n"), done.stderr
    done = ssd("chat", "--address", address, "--keys", folder, said="hello\n")
    assert done.returncode == 0 and "hello" in done.stdout, done.stderr


def test_keys_without_an_address_or_without_a_client_are_bad_usage(tmp_path: Path) -> None:
    keys.new_server(tmp_path / "keys")
    for arguments, words in [
        (("--keys", tmp_path / "keys"), "--address"),
        (("--keys", tmp_path / "keys", "--address", "tcp://127.0.0.1:1"), "a client's are in"),
    ]:
        done = ssd("generate", "hello", *arguments)
        assert (done.returncode, done.stdout) == (2, "") and words in done.stderr
