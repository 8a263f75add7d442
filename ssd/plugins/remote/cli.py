"""`ssd draft` and `ssd edge`: a draft here for a target on another machine."""

from __future__ import annotations

import os
from typing import get_args

import click
import msgspec

from ssd.cli.launch import serve, server_options
from ssd.cli.options import engine_options
from ssd.client import Client
from ssd.config.engine import DraftWeights, DType, Upstream
from ssd.launch.options import EngineOptions
from ssd.launch.server import ServerOptions
from ssd.plugins.remote.configuration import check_address, edge_config, next_port, remote_draft
from ssd.system import interpreter

_FOLDER = click.Path(file_okay=False)
_CLOUD = ("zmq_bind", "zmq_keys", "draft_bind", "draft_keys", "draft_prompts")


@click.command()
@click.option("--connect", required=True, metavar="tcp://HOST:PORT", help="Address of `ssd launch --draft-bind`.")
@click.option("--keys", type=_FOLDER, help="Folder that ssd keys made for this draft. Needed for another machine.")
@click.option("--model", "-m", default="smollm2-draft", show_default=True, help="Model that drafts.")
@click.option("--target", help="A copy of the target here, for what a draft shares with it, and for grammars.")
@click.option("--dtype", type=click.Choice(get_args(DType)), help="Its type. Default: the one that is fast here.")
@click.option(
    "--weights",
    type=click.Choice(get_args(DraftWeights)),
    default="auto",
    show_default=True,
    help="light: 4 bits and few ids. auto: the fastest here.",
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
def draft(
    connect: str,
    keys: str | None,
    model: str,
    target: str | None,
    dtype: DType | None,
    weights: DraftWeights,
    device: str,
) -> None:
    """Draft for the engine at --connect, until Ctrl-C; connect again when the connection is lost.

    Prints `drafting for TARGET at ADDRESS` whenever the engine takes it. docs/remote.md says what crosses the link."""
    places = EngineOptions(draft_dtype=dtype, draft_weights=weights, draft_device=device)
    upstream = Upstream(draft_connect=connect, draft_keys=keys)
    options = remote_draft(upstream, model, target, places)
    payload = os.memfd_create("ssd-draft", 0)
    os.write(payload, msgspec.json.encode(options))
    os.lseek(payload, 0, os.SEEK_SET)
    command = interpreter.child_command("ssd.plugins.remote.drafter", str(payload))
    os.execve(command[0], command, interpreter.environment())


@click.command()
@click.option("--connect", required=True, metavar="tcp://HOST:PORT", help="Address of `ssd launch --zmq-bind`.")
@click.option("--keys", type=_FOLDER, help="Folder that ssd keys made for this client. Needed for another machine.")
@click.option("--draft-connect", metavar="tcp://HOST:PORT", help="Address of --draft-bind. Default: the next port.")
@click.option("--draft-keys", type=_FOLDER, help="Folder that ssd keys made for this draft.")
@click.option("--draft-model", "-m", default="smollm2-draft", show_default=True, help="Model that drafts here.")
@click.option("--target", help="A copy of the target here, for its tokenizer and what a draft shares with it.")
@engine_options(without={*EngineOptions.__struct_fields__} - {"draft_dtype", "draft_weights", "draft_device"})
@server_options(without=_CLOUD)
def edge(
    connect: str,
    keys: str | None,
    draft_connect: str | None,
    draft_keys: str | None,
    draft_model: str,
    target: str | None,
    engine: EngineOptions,
    server: ServerOptions,
) -> None:
    """Serve the model of the engine at --connect on this machine, and draft for it here.

    The other machine only verifies. Prints `http: URL` and `ready: ADDRESS`; Ctrl-C ends it. docs/edge.md has both
    machines' commands."""
    check_address(connect, keys)
    upstream = Upstream(
        connect=connect,
        keys=keys,
        draft_connect=draft_connect or next_port(connect),
        draft_keys=draft_keys,
    )
    with Client(connect, keys=keys) as client:
        found = client.describe()
    serve(edge_config(upstream, found, draft_model, target, engine, server))
