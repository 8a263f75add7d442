"""`ssd keys`: what it makes, says, and does not say."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result

from ssd.cli.main import main
from ssd.ipc import keys
from ssd.ipc.curve import client_keys


def ssd(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["keys", *map(str, arguments)])


def test_the_first_call_makes_the_engines_keys_and_later_ones_add_clients(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "keys"
    made = ssd("new", directory, "laptop")
    assert made.exit_code == 0
    assert [line.split("\t")[0] for line in made.stdout.splitlines()] == [
        str(directory),
        str(directory / "clients" / "laptop"),
    ]
    server = keys.load_pair(directory / "server.secret")
    again = ssd("new", directory, "laptop")
    said = f"error: client 'laptop' has keys in {directory} already\n"
    assert (again.exit_code, again.stdout, again.stderr) == (2, "", said)
    assert ssd("new", directory, "phone", "desk").exit_code == 0
    assert keys.load_pair(directory / "server.secret") == server
    listed = ssd("list", directory).stdout.splitlines()
    assert [line.split("\t")[0] for line in listed] == ["desk", "laptop", "phone"]
    assert listed[1].split("\t")[1] == client_keys(directory / "clients" / "laptop").own.public.decode()


def test_a_client_is_made_where_none_is_named(tmp_path: Path) -> None:
    ssd("new", tmp_path / "keys")
    assert [name for name, _ in keys.authorizations(tmp_path / "keys")] == ["client"]


def test_no_secret_is_ever_printed(tmp_path: Path) -> None:
    said = ssd("new", tmp_path / "keys", "laptop").output + ssd("list", tmp_path / "keys").output
    for path in (tmp_path / "keys").rglob("*.secret"):
        assert keys.load_pair(path).secret.decode() not in said
