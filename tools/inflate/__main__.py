"""Make a checkpoint wider and deeper without changing what it computes: a small model at the cost of a large one.

    python -m tools.inflate smollm2 --like llama-8b --out /tmp/target
    python -m tools.inflate smollm2-draft --lender smollm2 --hidden-size 1024 --layers 12 --out /tmp/draft

Its texts, and how often a draft is right about them, are the small model's; its bytes and multiplications are the large
one's, but for the vocabulary, which stays. In bfloat16 it differs from the small model by rounding. A size that is not
given is that of --like, or stays. A shard at a time is in memory.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import torch

from ssd.errors import SsdError, UsageError
from ssd.models import hub
from ssd.models.checkpoint import Checkpoint, inspect
from ssd.models.draft_kinds import PLAIN, draft_kind
from ssd.models.pairs import SHARED, borrowed
from ssd.models.quantization import QUANTIZATION
from ssd.models.weights import from_checkpoint
from tools.inflate.sizes import LIKE, Sizes, fit
from tools.inflate.tensors import Inflation
from tools.inflate.writing import shards, write

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
_FLAGS = {
    "hidden_size": "--hidden-size",
    "num_hidden_layers": "--layers",
    "num_attention_heads": "--heads",
    "num_key_value_heads": "--kv-heads",
    "head_dim": "--head-dim",
    "intermediate_size": "--intermediate-size",
}


def _sizes(function: Any) -> Any:
    for name, flag in reversed(_FLAGS.items()):
        function = click.option(flag, name, type=click.IntRange(min=1), help=f"{name} of config.json.")(function)
    return function


@click.command(help=__doc__)
@click.argument("source")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True)
@click.option("--like", type=click.Choice(list(LIKE)), help="Take the sizes of this model.")
@_sizes
@click.option("--lender", help="The target of SOURCE, if SOURCE is a draft that shares tensors with one.")
@click.option("--dtype", type=click.Choice(list(_DTYPES)), default="bfloat16", show_default=True)
@click.option("--shard-gib", type=click.FloatRange(0, min_open=True), default=2.0, show_default=True)
@click.option("--seed", default=0, show_default=True, help="Of what is random and adds nothing.")
def main(
    source: str,
    out: Path,
    like: str | None,
    lender: str | None,
    dtype: str,
    shard_gib: float,
    seed: int,
    **given: int | None,
) -> None:
    try:
        checkpoint = _opened(source, lender)
        wanted = LIKE[like].sizes if like else Sizes.of(checkpoint.config)
        wanted = replace(wanted, **{name: size for name, size in given.items() if size is not None})
        inflate(checkpoint, wanted, out, _DTYPES[dtype], int(shard_gib * 2**30), seed)
    except SsdError as error:
        raise click.ClickException(str(error)) from None
    size = sum(file.stat().st_size for file in out.iterdir())
    click.echo(f"{out}: {size / 2**30:.2f} GiB, {json.dumps(asdict(wanted))}")


def _opened(source: str, lender: str | None) -> Checkpoint:
    """Open the source, with the tensors that it reads from its lender's files."""
    checkpoint = inspect(hub.ensure(source))
    if (kind := draft_kind(checkpoint)) is not PLAIN:
        raise UsageError(f"{source} is {kind.name}, which reads its target's hidden states: it cannot be inflated")
    if checkpoint.config.get(SHARED):
        if lender is None:
            raise UsageError(f"{source} shares tensors with its target: name that with --lender")
        checkpoint = borrowed(checkpoint, inspect(hub.ensure(lender)))
    return checkpoint


def inflate(
    checkpoint: Checkpoint, sizes: Sizes, out: Path, dtype: torch.dtype, shard_bytes: int, seed: int = 0
) -> None:
    """Write `checkpoint` with these `sizes` to the folder `out`. Raises UsageError if they are too small for it."""
    if (out / "config.json").exists():
        raise UsageError(f"{out} has a checkpoint already")
    config = checkpoint.config
    found = fit(Sizes.of(config), sizes)
    layer, tied = "model.layers.0", bool(config.get("tie_word_embeddings", False))

    def has(bias: str) -> bool:
        return any(f"{layer}.{block}.{bias}" in checkpoint.tensors for block in ("self_attn", "mlp"))

    normed = f"{layer}.self_attn.q_norm.weight" in checkpoint.tensors
    weights = from_checkpoint(checkpoint, torch.float32, torch.device("cpu"))
    inflation = Inflation(found, lambda name: weights(name, *_shape(checkpoint, name)), dtype, normed, seed)
    cut = list(shards(inflation.parts(int(config["vocab_size"]), tied, has), dtype.itemsize, shard_bytes))
    needed = sum(dtype.itemsize * torch.Size(part.shape).numel() for shard in cut for part in shard)
    out.mkdir(parents=True, exist_ok=True)
    if needed > (free := shutil.disk_usage(out).free):
        raise UsageError(f"{out} needs {needed / 2**30:.1f} GiB, of which {free / 2**30:.1f} GiB are free there")
    write(out, cut, dtype.itemsize)
    for name in _COPIED:
        if (checkpoint.directory / name).exists():
            shutil.copy(checkpoint.directory / name, out)
    (out / "config.json").write_text(json.dumps(_config(config, sizes, dtype), indent=1))


def _shape(checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
    if name not in checkpoint.tensors:
        raise UsageError(f"{checkpoint.directory}: tensor {name} is missing")
    return checkpoint.tensors[name].shape


def _config(config: dict[str, Any], sizes: Sizes, dtype: torch.dtype) -> dict[str, Any]:
    """Return the config.json of the inflated model. Added layers come last and are of the last one's kind."""
    share = int(config["hidden_size"]) / sizes.hidden_size
    changed = {**config, **asdict(sizes), "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)) * share}
    changed |= {"dtype": str(dtype).removeprefix("torch.")}
    for key in (SHARED, QUANTIZATION, "torch_dtype"):
        changed.pop(key, None)
    if kinds := config.get("layer_types"):
        changed["layer_types"] = [*kinds, *kinds[-1:] * (sizes.num_hidden_layers - len(kinds))]
    return changed


if __name__ == "__main__":
    main()
