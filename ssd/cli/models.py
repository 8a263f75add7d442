"""`ssd models`: what can be run here."""

from __future__ import annotations

import click


@click.command()
def models() -> None:
    """List the built-in models and the model families that checkpoints may have."""
    from rich.console import Console
    from rich.table import Table

    from ssd.models.hub import BUILTIN
    from ssd.models.registry import families

    console = Console()
    builtin = Table("name", "kind", "parameters", "here", "licence", title="built-in models", title_justify="left")
    for model in BUILTIN.values():
        here = "yes" if model.present else "no"
        builtin.add_row(model.name, model.kind, model.parameters, here, model.licence)
    console.print(builtin)
    known = Table("model_type", "from", title="model families", title_justify="left")
    for family, source in families().items():
        known.add_row(family, source)
    console.print(known)
