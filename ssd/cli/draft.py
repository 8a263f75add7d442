"""`ssd draft`: a draft on this machine for a target on another one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args

import click
import msgspec

from ssd.config.engine import DType, Quantize
from ssd.launch.options import EngineOptions
from ssd.remote.configuration import remote_draft
from ssd.system import interpreter


@click.command()
@click.option("--connect", required=True, metavar="tcp://HOST:PORT", help="Address of `ssd launch --draft-bind`.")
@click.option(
    "--keys",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder that ssd keys made for this draft. Needed for another machine.",
)
@click.option("--model", "-m", default="smollm2-draft", show_default=True, help="Model that drafts.")
@click.option("--target", help="A copy of the target here, for what a draft shares with it, and for grammars.")
@click.option("--dtype", type=click.Choice(get_args(DType)), help="Its type. Default: the one that is fast here.")
@click.option("--quantize", type=click.Choice(get_args(Quantize)), help="Default: int8 where that is faster.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
def draft(
    connect: str,
    keys: Path | None,
    model: str,
    target: str | None,
    dtype: DType | None,
    quantize: Quantize | None,
    device: str,
) -> None:
    """Draft for the engine at --connect, until Ctrl-C; connect again when the connection is lost.

    Prints `drafting for TARGET at ADDRESS` whenever the engine takes it. docs/remote.md says what crosses the link."""
    places = EngineOptions(draft_dtype=dtype, draft_quantize=quantize, draft_device=device)
    options = remote_draft(connect, keys, model, target, places)
    payload = os.memfd_create("ssd-draft", 0)
    os.write(payload, msgspec.json.encode(options))
    os.lseek(payload, 0, os.SEEK_SET)
    command = interpreter.child_command("ssd.remote.drafter", str(payload))
    os.execve(command[0], command, interpreter.environment())
