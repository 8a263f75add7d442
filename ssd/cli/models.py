"""`ssd models`: what can be run here."""

from __future__ import annotations

import click

_DRAFTS = (
    ("model", "--draft MODEL, of any family, with the target's tokens"),
    ("cascade", "--draft SMALL --draft LARGER: each helps the next"),
    ("EAGLE-3 head", "--draft HEAD, in the Llama layout, for targets of every family listed above"),
    ("n-gram", "--backup ngram or auto, beside any draft, where it has nothing"),
)


@click.command()
def models() -> None:
    """List the built-in models, the families that checkpoints may have, and what can be a draft."""
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
    out.print(grid("drafts", ("kind", "given by"), _DRAFTS, left=2))
