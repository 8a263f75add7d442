from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import click

from ssd.cli.outputs import console, grid
from ssd.config.engine import WeightFormat
from ssd.errors import UsageError
from ssd.kernels import build
from ssd.launch.options import EngineOptions, chosen
from ssd.models import hub, pairs, registry, sizes
from ssd.models.checkpoint import Checkpoint, has_chat_template, inspect
from ssd.models.draft_kinds import PLAIN, draft_kind, is_in_target, kinds
from ssd.models.gguf.architectures import architectures
from ssd.models.pull import BUILTIN
from ssd.models.pull import pull as fetch
from ssd.system.version import TESTED_TRANSFORMERS

_COMMON = (
    f"Built-in families are compared with transformers {TESTED_TRANSFORMERS}. Their weights may be floats or FP8, AWQ, "
    "GPTQ, compressed-tensors; those of gpt_oss MXFP4, too.\n"
)
_CASCADE = ("cascade", "--draft SMALL --draft LARGER: each helps the next", "any")
_NGRAM = ("n-gram", "--backup ngram or auto, beside any draft, where it has nothing", "any")


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
    found = _described(EngineOptions(target=name, **given))
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
        "states": f"{found['state_bytes'] / gib:.2f} GiB for {found['sequences']} sequences and the prefix cache",
        "keys and values": f"{found['cache_bytes'] / gib:.2f} GiB for {found['sequences']} x {found['tokens']} tokens",
    }
    if not found["state_bytes"]:
        del rows["states"]
    if found["draft"] is not None:
        rows[f"draft {found['draft']}"] = "fits" if found["draft_fits"] else f"does not fit: {found['draft_why_not']}"
    width = max(map(len, rows))
    for title, text in rows.items():
        print(f"{title:{width}}  {text}")


def _described(options: EngineOptions) -> dict[str, Any]:
    """Return the description of `options.target` as JSON: its model, its memory, and if the draft fits it.

    Memory is in bytes, on this machine's CPU. Raises UsageError for a checkpoint that cannot be read."""
    from ssd.launch import memory  # with it comes numpy

    options = chosen(options)
    model = inspect(hub.resolve(options.target))
    found, count = sizes.ModelSizes.of(model), sizes.weights(model)
    tokens, target = options.max_model_len or found.context, memory.Sized(model, options.dtype)
    types = Counter(info.dtype for info in model.tensors.values())
    draft, why_not = options.draft[0] if options.draft else None, None
    if draft is not None:
        why_not = _why_not(model, draft)
    return {
        "directory": str(model.directory),
        "model_type": str(model.config.get("model_type")),
        "family": _family(model),
        "parameters": count,
        "layers": found.layers,
        "width": found.width,
        "heads": found.heads,
        "key_heads": found.kv_heads,
        "head_dim": found.head_dim,
        "vocabulary": found.vocab_size,
        "tensors": dict(types.most_common()),
        "bits_per_weight": round(8 * model.nbytes / count, 2),
        "disk_bytes": model.nbytes,
        "context": found.context,
        "rope": _rope(model.config),
        "chat_template": has_chat_template(model.directory),
        "dtype": options.dtype,
        "weight_bytes": memory.host_weights(options, target, [], [WeightFormat()]),
        "sequences": options.max_num_seqs,
        "tokens": tokens,
        "state_bytes": memory.state_bytes(options, model),
        "cache_bytes": options.max_num_seqs * tokens * memory.token_bytes(options, target),
        "draft": draft,
        "draft_fits": None if draft is None else why_not is None,
        "draft_why_not": why_not,
    }


def _family(model: Checkpoint) -> str:
    if (kind := draft_kind(model)) is not PLAIN:
        return f"{kind.name}, a draft only"
    known = registry.families().get(str(model.config.get("model_type")))
    if known is not None:
        return known
    other = registry.fallback()
    return other.family() if other else "not supported: nothing that is installed runs it"


def _rope(config: Mapping[str, Any]) -> str:
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        return "unknown"
    nested = {kind: part for kind, part in scaling.items() if isinstance(part, Mapping)}
    if nested:
        return ", ".join(f"{kind}: {_rope({'rope_parameters': part})}" for kind, part in nested.items())
    kind, factor = str(scaling.get("rope_type", scaling.get("type", "default"))), scaling.get("factor")
    return kind if factor is None else f"{kind}, factor {factor}"


def _why_not(target: Checkpoint, name: str) -> str | None:
    other = None if is_in_target(name) else inspect(hub.resolve(name))
    try:
        draft = other or registry.own_draft(target, name)
        if draft_kind(target) is not PLAIN or target.config.get(pairs.SHARED) or target.config.get(pairs.DRAFT_VOCAB):
            raise UsageError(f"{target.directory} can only be a draft: part of it is left to a target")
        pairs.check_pair(target, draft)
        pairs.borrowed(draft, target)
        draft_kind(draft).layers(draft, target)
    except UsageError as error:
        return str(error)
    return None


def _list() -> None:
    rows = [(m.name, m.kind, m.parameters, "yes" if m.present else "no", m.licence) for m in BUILTIN.values()]
    columns = ("name", "kind", "parameters", "here", "licence")
    out = console()
    out.print(grid("built-in models", columns, rows, left=len(columns)))
    ggufs = architectures()
    known = [
        (kind, origin, ", ".join(name for name, one in ggufs.items() if one.names.model_type == kind))
        for kind, origin in registry.families().items()
    ]
    if (other := registry.fallback()) is not None:
        known.append(("any other causal language model", other.offer(), ""))
    out.print(grid("model families", ("model_type", "from", "GGUF"), known, left=3))
    out.print(_COMMON)
    drafts = [PLAIN.offer, _CASCADE, *(kind.offer for kind in kinds().values()), _NGRAM]
    out.print(grid("drafts", ("kind", "given by", "targets"), drafts, left=3))


@click.command()
@click.argument("name", required=False)
@click.option("--force", is_flag=True, help="Fetch a built-in model again although it is there.")
def pull(name: str | None, force: bool) -> None:
    """Fetch the built-in model NAME with its draft, or the hub model ORG/NAME, and compile the kernels.

    The folder of NAME is printed. What is there already is not fetched or compiled again. Without NAME the kernels are
    compiled alone."""
    from ssd.cli.session import process_setup, starting

    if force and name not in BUILTIN:
        raise UsageError("--force is for built-in models: a hub download is checked against the hub each time")
    if name is not None:
        for one in filter(None, (name, BUILTIN[name].draft)) if name in BUILTIN else ():
            if not fetch(one, force=force):
                click.echo(f"{one} is there already", err=True)
        print(hub.resolve(name))
    with process_setup(), starting(""):
        build.library()
