"""`ssd launch`: an engine that stays up."""

from __future__ import annotations

import click

from ssd.cli.options import engine_options
from ssd.cli.server_options import config_file, server_options
from ssd.cli.session import loading, process_setup
from ssd.config import EngineConfig
from ssd.errors import SsdError
from ssd.launch_config import EngineOptions, resolve
from ssd.server_config import ServerOptions
from ssd.supervisor import Engine


@click.command()
@engine_options
@server_options
@config_file
@click.option("--dry-run", is_flag=True, help="Print the configuration that would be used, as JSON, and end.")
def launch(engine: EngineOptions, server: ServerOptions, dry_run: bool) -> None:
    """Start an engine, print where it is served (`http: URL`, `zmq: ADDRESS` of --zmq-bind, `ready: ADDRESS`), and stay
    up.

    Ctrl-C or SIGTERM lets open requests finish, within --shutdown-timeout, and ends; a second one ends at once. A node
    that only follows prints `ready: node N of M` and ends when node 0 does.
    """
    config = resolve(engine, server)
    if dry_run:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(config), indent=2).decode())
        return
    if config.nodes is not None and config.nodes.rank:
        _follow(config)
    else:
        _serve(config)


def _follow(config: EngineConfig) -> None:
    """A node of several, which ends when node 0 ends."""
    from ssd.follower_node import FollowerNode

    assert config.nodes is not None
    ranks, node = config.ranks, config.nodes
    words = f"ready: node {node.rank} of {node.count}, ranks {ranks.start} to {ranks.stop - 1}"
    with process_setup():
        click.echo(f"waiting for node 0 at {node.endpoint}", err=True)
        FollowerNode(config).run(lambda: click.echo(words))
    click.echo("node 0 has ended", err=True)


def _serve(config: EngineConfig) -> None:
    running = Engine(config)
    ready = False
    with process_setup():
        try:
            with loading(running):
                running.start()
            ready = True
            if running.url is not None:
                click.echo(f"http: {running.url}")
            if config.server.zmq_bind is not None:
                click.echo(f"zmq: {config.server.zmq_bind}")
            click.echo(f"ready: {running.address}")
            running.wait()
        except KeyboardInterrupt:
            if not ready:
                raise
            click.echo("draining", err=True)
            running.stop()
            if running.failure is None:
                return
        finally:
            running.stop(drain=0.0)
    raise running.failure or SsdError("the engine ended by itself")
