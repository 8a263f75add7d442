"""The family table of docs/models.md: `python -m tests.models.differences [MODULE:KNOBS ...]`.

For every family, over all options that the modules list (by default `tests.models.knobs`), the largest difference
between its float32 logits and those of transformers' plain forward, for a text read in parts through the paged cache.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch

from ssd.execution.batch import Row
from ssd.models import registry
from tests.models import tiny
from tests.models.knobs import Knobs

PARTS = (40, 1, 7, 1, 1, 40)


def difference(kind: str, options: dict[str, Any], directory: Path) -> float:
    """Largest difference of any logit of the text, of a tiny random model with these options."""
    tiny.model(kind, directory, **options)
    text = tiny.token_ids(sum(PARTS), 0)
    runner, expected = tiny.runner(directory), tiny.oracle_logits(tiny.oracle(directory), text)
    logits, start = [], 0
    for size in PARTS:
        logits.append(runner.forward([Row(text[start : start + size], start, range(64), size)]))
        start += size
    return float((torch.cat(logits) - expected).abs().max())


def table(families: Knobs) -> list[str]:
    """Rows of a Markdown table, one per `model_type`."""
    found: dict[str, list[float]] = {}
    for name, (kind, options) in families.items():
        with tempfile.TemporaryDirectory() as folder:
            found.setdefault(kind, []).append(difference(kind, options, Path(folder) / name.replace("/", " ")))
    known = registry.families()
    return [
        f"| `{kind}` | {known.get(kind, 'fallback')} | {len(some)} | {max(some):.1e} |"
        for kind, some in sorted(found.items())
    ]


def main() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    print("| family | source | options tried | largest difference |\n|---|---|---|---|")
    for name in sys.argv[1:] or ["tests.models.knobs:FAMILIES"]:
        print(*table(resolve_name(name)), sep="\n")


if __name__ == "__main__":
    main()
