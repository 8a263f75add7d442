"""`ssd models` and `ssd pull`: what can be run here, and how a model gets here."""

from __future__ import annotations

import click

_DRAFTS = (
    ("model", "--draft MODEL, of any family, with the target's tokens"),
    ("cascade", "--draft SMALL --draft LARGER: each helps the next"),
    (
        "EAGLE-3 head",
        "--draft HEAD, in SafeAILab's or speculators' layout, for targets of every family listed above",
    ),
    ("n-gram", "--backup ngram or auto, beside any draft, where it has nothing"),
)


@click.command()
def models() -> None:
    """List the built-in models, the families that checkpoints may have, and what can be a draft."""
    from ssd.bench.outputs import console, grid
    from ssd.models.fallback import HOW_TO_INSTALL, installed
    from ssd.models.pull import BUILTIN
    from ssd.models.registry import families

    rows = [(m.name, m.kind, m.parameters, "yes" if m.present else "no", m.licence) for m in BUILTIN.values()]
    columns = ("name", "kind", "parameters", "here", "licence")
    out = console()
    out.print(grid("built-in models", columns, rows, left=len(columns)))
    fallback = f"fallback: transformers {found}, slower" if (found := installed()) else f"fallback: {HOW_TO_INSTALL}"
    known = [*families().items(), ("any other causal language model", fallback)]
    out.print(grid("model families", ("model_type", "from"), known, left=2))
    out.print(grid("drafts", ("kind", "given by"), _DRAFTS, left=2))


@click.command()
@click.argument("name")
@click.option("--force", is_flag=True, help="Fetch a built-in model again although it is there.")
def pull(name: str, force: bool) -> None:
    """Fetch the built-in model NAME, or the hub model ORG/NAME, and print its folder.

    A download that was cut short is continued."""
    from ssd.errors import UsageError
    from ssd.models import hub
    from ssd.models.pull import BUILTIN
    from ssd.models.pull import pull as fetch

    if force and name not in BUILTIN:
        raise UsageError("--force is for built-in models: a hub download is checked against the hub each time")
    if name in BUILTIN and not fetch(name, force=force):
        click.echo(f"{name} is there already", err=True)
    print(hub.resolve(name))
