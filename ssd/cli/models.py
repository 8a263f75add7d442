"""`ssd models` and `ssd pull`: lists and describes models, and fetches them."""

from __future__ import annotations

import json
from typing import Any

import click

from ssd.errors import UsageError

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
@click.argument("name", required=False)
@click.option("--draft", help="With NAME: say whether this model fits it as a draft, or why not.")
@click.option("--max-num-seqs", type=click.IntRange(1, 1024), help="With NAME: memory for so many sequences.")
@click.option("--max-model-len", type=click.IntRange(1), help="With NAME: of so many tokens each.")
@click.option("--json", "as_json", is_flag=True, help="With NAME: print JSON; memory in bytes.")
def models(
    name: str | None, draft: str | None, max_num_seqs: int | None, max_model_len: int | None, as_json: bool
) -> None:
    """List the built-in models, the families that checkpoints may have, and what can be a draft.

    With NAME (a built-in name, a folder, a .gguf file, a hub name) say what this checkpoint is, and how much memory it
    takes. A hub model is downloaded first. No weights are loaded."""
    given = {"draft": draft and (draft,), "max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
    given = {key: value for key, value in given.items() if value is not None}
    if name is not None:
        _describe(name, given, as_json)
    elif given or as_json:
        raise UsageError("--draft, --max-num-seqs, --max-model-len and --json need the NAME of a model")
    else:
        _list()


def _describe(name: str, given: dict[str, Any], as_json: bool) -> None:
    from ssd.launch.describe import describe
    from ssd.launch.options import EngineOptions

    found = describe(EngineOptions(target=name, **given))
    if as_json:
        print(json.dumps(found))
        return
    gib = 2**30
    rows = {
        "folder": found["directory"],
        "family": f"{found['model_type']} ({found['family']})",
        "parameters": f"{found['parameters']:,}",
        "layers": f"{found['layers']} of width {found['width']}",
        "heads": f"{found['heads']} of {found['head_dim']} numbers, {found['key_heads']} of keys",
        "vocabulary": f"{found['vocabulary']} tokens",
        "tensors": ", ".join(f"{kind} {count}" for kind, count in found["tensors"].items()),
        "on disk": f"{found['disk_bytes'] / gib:.2f} GiB, {found['bits_per_weight']:g} bits a weight",
        "context": f"{found['context']} tokens, rope scaling {found['rope']}",
        "chat template": "yes" if found["chat_template"] else "no",
        "weights in memory": f"{found['weight_bytes'] / gib:.2f} GiB at most, in {found['dtype']}",
        "keys and values": f"{found['cache_bytes'] / gib:.2f} GiB for {found['sequences']} x {found['tokens']} tokens",
    }
    if found["draft"] is not None:
        rows[f"draft {found['draft']}"] = "fits" if found["draft_fits"] else f"does not fit: {found['draft_why_not']}"
    width = max(map(len, rows))
    for title, text in rows.items():
        print(f"{title:{width}}  {text}")


def _list() -> None:
    from ssd.bench.outputs import console, grid
    from ssd.models.pull import BUILTIN
    from ssd.models.registry import families
    from ssd.system.version import HOW_TO_INSTALL, installed_transformers

    rows = [(m.name, m.kind, m.parameters, "yes" if m.present else "no", m.licence) for m in BUILTIN.values()]
    columns = ("name", "kind", "parameters", "here", "licence")
    out = console()
    out.print(grid("built-in models", columns, rows, left=len(columns)))
    fallback = (
        f"fallback: transformers {found}, slower"
        if (found := installed_transformers())
        else f"fallback: {HOW_TO_INSTALL}"
    )
    known = [*families().items(), ("any other causal language model", fallback)]
    out.print(grid("model families", ("model_type", "from"), known, left=2))
    out.print(grid("drafts", ("kind", "given by"), _DRAFTS, left=2))


@click.command()
@click.argument("name")
@click.option("--force", is_flag=True, help="Fetch a built-in model again although it is there.")
def pull(name: str, force: bool) -> None:
    """Fetch the built-in model NAME, or the hub model ORG/NAME, and print its folder.

    A download that was cut short is continued."""
    from ssd.models import hub
    from ssd.models.pull import BUILTIN
    from ssd.models.pull import pull as fetch

    if force and name not in BUILTIN:
        raise UsageError("--force is for built-in models: a hub download is checked against the hub each time")
    if name in BUILTIN and not fetch(name, force=force):
        click.echo(f"{name} is there already", err=True)
    print(hub.resolve(name))
