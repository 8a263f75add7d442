"""`ssd serve-ray`: replicas of one engine on a Ray cluster."""

from __future__ import annotations

import click

from ssd.cli.command import GroupedCommand
from ssd.cli.launch import server_options
from ssd.cli.options import engine_options
from ssd.cli.session import process_setup
from ssd.cli.sources import READ, speculative_config_option
from ssd.launch.options import EngineOptions
from ssd.launch.server import ServerOptions
from ssd.plugins.ray import deployment
from ssd.system import registered

_EXAMPLES = """
ssd serve-ray serve.toml
ssd serve-ray serve.toml --port 8080
ssd serve-ray serve.toml --stop
"""


@click.command(cls=GroupedCommand, examples=_EXAMPLES)
@click.argument("config", **READ)
@engine_options()
@speculative_config_option
@server_options()
@click.option("--stop", is_flag=True, help="End the replicas that run, after the requests that they have.")
@click.pass_context
def serve_ray(context: click.Context, engine: EngineOptions, server: ServerOptions, stop: bool) -> None:
    """Start replicas of an engine on this machine's Ray cluster, with Ray Serve.

    CONFIG is the TOML file of `ssd launch --config`, and may have a table [replicas] with min, max, load (requests that
    each should have, running and waiting) and cpus. Prints `http: URL` when they answer, and ends; they go on. A second
    time it replaces those that run, one after the other."""
    with process_setup():
        if stop:
            deployment.stop()
        else:
            table = context.meta[registered.TABLES].get("replicas", {})
            click.echo(f"http: {deployment.deploy(engine, server, table)}")
