"""Distil a draft from a target: write a corpus, train on it, evaluate the draft (docs/distillation.md).

    python -m tools.distill smollm2 --out /tmp/draft --layers 0,1,2,3,4,27,28,29
    python -m tools.distill smollm2 --out /tmp/head --kind eagle3 --draft-vocab 16384

Every stage leaves files in OUT or OUT/work and goes on where it was interrupted: run the same command again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import click

from ssd.errors import SsdError
from tools.distill.job import KINDS, STAGES, Job
from tools.distill.layouts import Layout
from tools.distill.student import Store

_SECONDS = click.FloatRange(min=0)
_POSITIVE, _NATURAL = click.IntRange(min=1), click.IntRange(min=0)


class Numbers(click.ParamType):
    """Numbers such as "0,1,2"; the value is a tuple."""

    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            return value if isinstance(value, tuple) else tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers", param, ctx)


@click.command(help=__doc__)
@click.argument("target")
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--work", type=click.Path(path_type=Path), help="Where the corpus is; default OUT/work.")
@click.option("--prompts", help="User messages: humaneval, a JSONL file, hub:org/name. Default: the target's own.")
@click.option("--conversations", type=_POSITIVE, default=4096, show_default=True)
@click.option("--shard", type=_POSITIVE, default=128, show_default=True, help="Conversations of a shard.")
@click.option("--answer-tokens", type=_POSITIVE, default=320, show_default=True)
@click.option(
    "--keep-features",
    type=Numbers(),
    default=(),
    help="Store hidden states after these layers with the corpus (2 x width bytes a token and layer), so that training "
    "a head on them need not run the target again.",
)
@click.option("--kind", type=click.Choice(KINDS), default=KINDS[0], show_default=True)
@click.option(
    "--layers",
    type=Numbers(),
    default=(),
    help="The target's layers to begin with, over its embedding. Of a head: after how many it reads hidden states.",
)
@click.option("--width", type=_NATURAL, default=0, help="Or: an independent model of this width (a multiple of 64).")
@click.option("--depth", type=_NATURAL, default=0, help="And its number of layers (default 4).")
@click.option(
    "--draft-vocab", type=_NATURAL, default=0, help="Tokens that it predicts: the most frequent of the corpus; 0: all."
)
@click.option(
    "--unroll",
    type=_NATURAL,
    default=4,
    show_default=True,
    help="Of a head: on how many of its own states it is trained, at most.",
)
@click.option(
    "--feed-forward",
    type=_NATURAL,
    default=0,
    help="Of a head: the width of its feed-forward; default: the target's.",
)
@click.option("--own-head", is_flag=True, help="Of a head: train an lm_head of its own, which other engines ask for.")
@click.option(
    "--store",
    type=click.Choice(get_args(Store)),
    default="bfloat16",
    show_default=True,
    help="Type of the layers of attention and feed-forward on disk; they are rounded in training.",
)
@click.option(
    "--format",
    "layout",
    type=click.Choice(get_args(Layout)),
    default="sglang",
    show_default=True,
    help="Layout of a head's folder.",
)
@click.option("--begin", help="Begin with the weights of this draft, a folder or a name, of the same shape.")
@click.option("--epochs", type=_POSITIVE, default=4, show_default=True)
@click.option(
    "--optimizer",
    type=click.Choice(("adamw", "muon")),
    help="Default: muon for heads, which begin at random; else adamw.",
)
@click.option("--learning-rate", type=float, help="Its highest. Default: 1e-3 of AdamW, 6e-3 of Muon.")
@click.option("--batch-tokens", type=_POSITIVE, default=1024, show_default=True, help="Tokens of a training step.")
@click.option("--seed", default=0, show_default=True)
@click.option("--device", default="cpu", show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(("float32", "bfloat16", "float16")),
    help="Of the target while it writes. Default: the device's fastest, float32 or bfloat16.",
)
@click.option(
    "--workers",
    type=_POSITIVE,
    default=1,
    show_default=True,
    help="Processes that write and, on a CPU, train, each with its share of the cores.",
)
@click.option(
    "--batch", type=_POSITIVE, default=48, show_default=True, help="Conversations written at a time, by each worker."
)
@click.option("--evaluate-on", multiple=True, help="Prompts to evaluate on, as for --prompts.")
@click.option("--evaluate-prompts", type=_POSITIVE, default=32, show_default=True, help="At most so many of each.")
@click.option(
    "--write-seconds",
    type=_SECONDS,
    help="Stop writing after so long and go on with what is there; 0: write nothing. Default: all --conversations.",
)
@click.option("--train-seconds", type=_SECONDS, help="Train for at most so long. Default: all --epochs.")
@click.option("--until", type=click.Choice(STAGES), default=STAGES[-1], show_default=True, help="Last stage to run.")
def main(**flags: Any) -> None:
    job = Job(**flags)
    try:
        job.run()
    except SsdError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
