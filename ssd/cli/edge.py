"""`ssd edge`: a frontend and a draft on this machine, for a target on another one."""

from __future__ import annotations

from pathlib import Path

import click

from ssd.cli.launch import serve, server_options
from ssd.cli.options import engine_options
from ssd.client import Client
from ssd.config.engine import Upstream
from ssd.launch.options import EngineOptions
from ssd.launch.server import ServerOptions
from ssd.remote.configuration import check_address
from ssd.remote.edge.configuration import edge_config, next_port

_FOLDER = click.Path(path_type=Path, file_okay=False)
_CLOUD = ("zmq_bind", "zmq_keys", "draft_bind", "draft_keys", "draft_prompts")


@click.command()
@click.option("--connect", required=True, metavar="tcp://HOST:PORT", help="Address of `ssd launch --zmq-bind`.")
@click.option("--keys", type=_FOLDER, help="Folder that ssd keys made for this client. Needed for another machine.")
@click.option("--draft-connect", metavar="tcp://HOST:PORT", help="Address of --draft-bind. Default: the next port.")
@click.option("--draft-keys", type=_FOLDER, help="Folder that ssd keys made for this draft.")
@click.option("--draft-model", "-m", default="smollm2-draft", show_default=True, help="Model that drafts here.")
@click.option("--target", help="A copy of the target here, for its tokenizer and what a draft shares with it.")
@engine_options(without={*EngineOptions.__struct_fields__} - {"draft_dtype", "draft_quantize", "draft_device"})
@server_options(without=_CLOUD)
def edge(
    connect: str,
    keys: Path | None,
    draft_connect: str | None,
    draft_keys: Path | None,
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
        keys=None if keys is None else str(keys),
        draft_connect=draft_connect or next_port(connect),
        draft_keys=None if draft_keys is None else str(draft_keys),
    )
    with Client(connect, keys=keys) as client:
        found = client.describe()
    serve(edge_config(upstream, found, draft_model, target, engine, server))
