"""`ssd launch`, also `ssd serve`: an engine that stays up."""

from __future__ import annotations

import functools

import click
from click.core import ParameterSource
from msgspec.structs import replace

from ssd.cli.command import GroupedCommand
from ssd.cli.options import engine_options, table_options
from ssd.cli.session import loading, process_setup
from ssd.cli.sources import config_option, speculative_config_option
from ssd.config.engine import EngineConfig
from ssd.errors import SsdError, UsageError
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.server import ServerOptions
from ssd.launch.supervisor import Engine

server_options = functools.partial(table_options, ServerOptions(), "server")
_LAUNCH = """
ssd launch smollm2
ssd launch ./model.gguf --draft ./small.gguf --port 8080
ssd launch Qwen/Qwen3-8B --device cuda --host 0.0.0.0 --api-key-file keys.txt
"""


@click.command(cls=GroupedCommand, examples=_LAUNCH)
@click.argument("model", required=False)
@engine_options()
@speculative_config_option
@server_options()
@config_option
@click.option("--dry-run", is_flag=True, help="Print the configuration that would be used, as JSON, and end.")
@click.pass_context
def launch(
    context: click.Context, model: str | None, engine: EngineOptions, server: ServerOptions, dry_run: bool
) -> None:
    """Start an engine for MODEL (or --target) and keep it up.

    Prints where it is served: `http: URL`, `zmq: ADDRESS` of --zmq-bind, and `ready: ADDRESS` last. Ctrl-C or SIGTERM
    lets open requests finish within --shutdown-timeout, then ends; a second one ends at once."""
    if model is not None:
        if context.get_parameter_source("target") is ParameterSource.COMMANDLINE:
            raise UsageError("give the target as MODEL or as --target, not as both")
        engine = replace(engine, target=model)
    config = resolve(engine, server)
    if dry_run:
        import msgspec

        shown = replace(config, server=replace(config.server, api_keys=("...",) * len(config.server.api_keys)))
        click.echo(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode())
        return
    serve(config)


def serve(config: EngineConfig) -> None:
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
            if config.link is not None:
                click.echo(f"draft: {config.link.bind}")
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
