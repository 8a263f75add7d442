"""`ssd pull`: fetch a model before it is needed."""

from __future__ import annotations

import click


@click.command()
@click.argument("name")
@click.option("--force", is_flag=True, help="Fetch a built-in model again although it is there.")
def pull(name: str, force: bool) -> None:
    """Fetch the built-in model NAME, or the hub model ORG/NAME, and print its folder.

    A download that was cut short is continued.
    """
    from ssd.errors import UsageError
    from ssd.models import hub
    from ssd.models.pull import pull as fetch

    if force and name not in hub.BUILTIN:
        raise UsageError("--force is for built-in models: a hub download is checked against the hub each time")
    if name in hub.BUILTIN and not fetch(name, force=force):
        click.echo(f"{name} is there already", err=True)
    print(hub.resolve(name))
