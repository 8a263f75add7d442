"""Bring the built-in target to a machine without a network: compressed, in pieces that calls carry one by one.

    python -m tools.gpu_report.pieces        # here, before the first call: leaves the pieces in .carry

As a part it keeps the pieces that its call carries where the next call finds them, and joins them."""

from __future__ import annotations

import contextlib
import hashlib
import lzma
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from ssd.errors import UsageError
from ssd.models import hub
from ssd.models.gguf.tensors import GGUF_FILE
from ssd.models.pull import SOURCES, ModelSource, complete
from tools.gpu_report import distilling
from tools.gpu_report.job import Job, Row
from tools.processes import ROOT

NAME = "smollm2"
CARRIED = ROOT / ".carry"
# A call carries 64 MiB with the working tree, the first one without the packaged draft's weights.
_FIRST_MIB = 48
_CHUNK = 1 << 20


def rows(job: Job, *, join: bool = False) -> Iterator[Row]:
    """Keep the pieces that this call carries; with `join`, make the target of all of them, else begin anew."""
    kept = distilling.folder() / "pieces"
    if not join:
        shutil.rmtree(distilling.folder(), ignore_errors=True)
    kept.mkdir(parents=True, exist_ok=True)
    for piece in sorted(CARRIED.glob("piece*/*.xz.*")):
        shutil.copyfile(piece, kept / piece.name)
    pieces = sorted(kept.iterdir())
    for piece in pieces:
        yield {"name": piece.name, "mib": piece.stat().st_size / 2**20}
    if join and (pieces or not job.tiny):
        joined(pieces, SOURCES[NAME], distilling.folder() / "target")
        yield {"name": "target", "sha256": SOURCES[NAME].sha256, "ok": True}


def joined(pieces: Sequence[Path], source: ModelSource, directory: Path) -> None:
    """Make a checkpoint's folder of the pieces of its compressed GGUF.

    Raises UsageError if they are not all there or not those of the pinned file."""
    partial = directory.with_suffix(".partial")
    partial.mkdir(parents=True, exist_ok=True)
    running, unpacked = hashlib.sha256(), lzma.LZMADecompressor()
    with (partial / GGUF_FILE).open("wb") as file, contextlib.suppress(lzma.LZMAError, EOFError):
        for piece in pieces:
            with piece.open("rb") as packed:
                while chunk := packed.read(_CHUNK):
                    part = unpacked.decompress(chunk)
                    running.update(part)
                    file.write(part)
    if running.hexdigest() != source.sha256:
        names = ", ".join(piece.name for piece in pieces) or "none"
        raise UsageError(f"the pieces are not {source.wheels[0].member} (sha256 differs): {names}")
    complete(source, partial)
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)


@click.command(help=__doc__)
@click.option("--first", type=click.IntRange(min=1), default=_FIRST_MIB, show_default=True, help="MiB of the first.")
@click.option("--carry", type=click.Path(path_type=Path, file_okay=False), default=CARRIED)
def main(first: int, carry: Path) -> None:
    packed = lzma.compress((hub.ensure(NAME) / GGUF_FILE).read_bytes(), preset=9 | lzma.PRESET_EXTREME)
    for number, part in enumerate((packed[: first * 2**20], packed[first * 2**20 :]), start=1):
        piece = carry / f"piece{number}" / f"{NAME}.xz.{number}"
        piece.parent.mkdir(parents=True, exist_ok=True)
        piece.write_bytes(part)
        click.echo(f"{piece}: {len(part) / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
