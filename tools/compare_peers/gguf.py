"""The GGUF file that a target's weights come from."""

from __future__ import annotations

import math
from pathlib import Path

from ssd.models import hub
from ssd.models.gguf.header import read_header
from ssd.models.gguf.tensors import GGUF_FILE
from ssd.models.pull import SOURCES


def gguf_of(target: str) -> Path | None:
    """Return the target itself if it is a GGUF file, or the file of a built-in target, which is pulled once.

    None for other targets. Raises UsageError if the download fails."""
    if Path(target).suffix == ".gguf":
        return Path(target)
    return hub.ensure(target) / GGUF_FILE if target in SOURCES else None


def blocks(gguf: Path) -> str:
    """Return the types of a file's matrices and the mean bits of a weight: "5.7-bit blocks (Q4_1, Q8_0)"."""
    tables = [tensor for tensor in read_header(gguf).tensors if len(tensor.shape) == 2]
    bits = 8 * sum(table.stop - table.start for table in tables) / sum(math.prod(table.shape) for table in tables)
    return f"{bits:.1f}-bit blocks ({', '.join(sorted({table.kind for table in tables}))})"
