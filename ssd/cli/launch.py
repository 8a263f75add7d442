"""`ssd launch`: an engine that stays up."""

from __future__ import annotations

import click

from ssd.cli.options import engine_options
from ssd.cli.session import process_setup, spinner
from ssd.errors import SsdError
from ssd.launch_config import EngineOptions, resolve
from ssd.supervisor import Engine


@click.command()
@engine_options
def launch(engine: EngineOptions) -> None:
    """Start an engine, print `ready: ADDRESS`, and stay up.

    Ctrl-C or SIGTERM lets open requests finish, within --shutdown-timeout, and ends; a second one ends at once.
    """
    config = resolve(engine)
    running = Engine(config)
    ready = False
    with process_setup():
        try:
            with spinner(f"loading {config.target_name}"):
                running.start()
            ready = True
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
