"""Commands and clients that talk to a running engine over TCP, with keys."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ssd.client import Client
from ssd.config.engine import ServerConfig
from ssd.ipc import keys
from ssd.ipc.messages import Emission, Submit
from tests.client.serving import echo
from tests.scripted_engine import engine_config, following, gateway_thread, scripted_engine


class Engine(NamedTuple):
    """An engine that wants keys, and says what it is told; `owners` of the requests that its target got."""

    address: str
    owners: list[str]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    keys.new_server(tmp_path / "keys")
    for client in ("laptop", "phone"):
        keys.new_client(tmp_path / "keys", client)
    owners: list[str] = []

    def script(submit: Submit) -> Iterator[Emission]:
        owners.append(submit.owner)
        yield from echo(submit)

    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    server = ServerConfig(names=("scripted",), zmq_bind=address, zmq_keys=str(tmp_path / "keys"))
    with scripted_engine() as made, gateway_thread(made, engine_config(server=server)), following(made, script):
        yield Engine(address, owners)


def ssd(*arguments: str | Path, said: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ssd.cli.main", *map(str, arguments)]
    return subprocess.run(command, input=said, capture_output=True, text=True)


def test_generate_reaches_it_with_the_keys_of_a_client(engine: Engine, tmp_path: Path) -> None:
    address = engine.address
    folder = tmp_path / "keys" / "clients" / "laptop"
    done = ssd("generate", "one two", "--raw", "--address", address, "--keys", folder)
    assert (done.returncode, done.stdout) == (0, "one two\n"), done.stderr


def test_requests_of_one_key_have_one_owner_and_of_two_keys_two(engine: Engine, tmp_path: Path) -> None:
    """With whom they share the suffix memory and compiled grammars."""
    for name in ("laptop", "phone", "laptop"):
        with Client(engine.address, keys=tmp_path / "keys" / "clients" / name) as client:
            client.generate(["one two"])
    laptop, phone, again = engine.owners
    assert laptop == again and laptop != phone and "" not in engine.owners
