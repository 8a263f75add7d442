"""`ssd models`: what can be run here."""

from __future__ import annotations

import click


@click.command()
def models() -> None:
    """List the built-in models and the model families that checkpoints may have."""
    from ssd.cli.tables import console, grid
    from ssd.models.fallback import HOW_TO_INSTALL, installed
    from ssd.models.hub import BUILTIN
    from ssd.models.registry import families

    rows = [(m.name, m.kind, m.parameters, "yes" if m.present else "no", m.licence) for m in BUILTIN.values()]
    columns = ("name", "kind", "parameters", "here", "licence")
    out = console()
    out.print(grid("built-in models", columns, rows, left=len(columns)))
    fallback = f"fallback: transformers {found}, slower" if (found := installed()) else f"fallback: {HOW_TO_INSTALL}"
    known = [*families().items(), ("any other causal language model", fallback)]
    out.print(grid("model families", ("model_type", "from"), known, left=2))
