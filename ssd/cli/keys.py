"""`ssd keys`: who may talk to an engine."""

from __future__ import annotations

from pathlib import Path

import click

from ssd.ipc import keys as key_files

_DIRECTORY = click.argument("directory", type=click.Path(path_type=Path, file_okay=False))


@click.group()
def keys() -> None:
    """Make and list the keys for ZeroMQ over TCP (CURVE).

    DIRECTORY is the engine's. `authorized` in it has a public key for each client that may connect: remove a file to
    refuse that client's next connection. `clients/NAME` is what client NAME needs: copy it there by a safe way."""


@keys.command()
@_DIRECTORY
@click.argument("names", nargs=-1, metavar="[NAME]...")
def new(directory: Path, names: tuple[str, ...]) -> None:
    """Make keys for the clients NAME (default: client), and the engine's if DIRECTORY has none yet."""
    for name in names:
        key_files.check_name(name)
    if not key_files.has_server(directory):
        key_files.new_server(directory)
        click.echo(f"{directory}\tfor ssd launch --zmq-keys")
    for name in names or ("client",):
        click.echo(f"{key_files.new_client(directory, name)}\tfor client {name}")


@keys.command("list")
@_DIRECTORY
def list_clients(directory: Path) -> None:
    """List the clients that may connect, with their public keys."""
    key_files.check_server(directory)
    for name, path in key_files.authorizations(directory):
        click.echo(f"{name}\t{key_files.load_public(path).decode()}")
