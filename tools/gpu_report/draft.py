"""Train a draft on the corpus that is there, and pack it for the way back (tools/gpu_report/README.md)."""

from __future__ import annotations

import json
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

from tools.distill.job import HELD_OUT_FILE
from tools.gpu_report import distilling
from tools.gpu_report.job import Job, Row

# What the command needs besides the time in which it trains: to read the corpus before, to write the draft behind it.
_AROUND_S = 35.0
_DRAFT_FILES = (
    "model.safetensors",
    "config.json",
    "draft_vocab.safetensors",
    "speculation.json",
    "evaluation.json",
    "training.jsonl",
    "recipe.json",
    HELD_OUT_FILE,
)


def rows(
    job: Job, *, seconds: float = 110.0, batch_tokens: int = 16384, epochs: int = 3, tiny: bool = False
) -> Iterator[Row]:
    """Train for at most `seconds`; yield what each epoch brought. Leaves draft.tar."""
    recipe = distilling.recipe(job, tiny)
    limit = max(1.0, min(seconds, job.left() - _AROUND_S))
    more = ["--until", "train", "--write-seconds", "0", "--train-seconds", f"{limit:.0f}", "--epochs", str(epochs)]
    if not recipe.tiny:
        more += ["--batch-tokens", str(batch_tokens)]
    began = time.monotonic()
    with distilling.started("tools.distill", recipe.command(job.device, *more)) as process:
        for _ in distilling.ticks(process, job):
            pass
        state = distilling.ended(process)
    epochs_done = recipe.out / "training.jsonl"
    for line in epochs_done.read_text().splitlines() if epochs_done.exists() else ():
        entry = json.loads(line)
        yield {"name": f"after {entry.pop('step')} steps"} | entry
    size = pack_draft(recipe.out, Path(job.out))
    yield {"name": "draft", "state": state, "seconds": distilling.since(began), "bytes": size, "ok": state == "done"}


def pack_draft(folder: Path, out: Path) -> int:
    """Pack the files of a draft that are there, without the tokenizer. Returns the size of draft.tar."""
    partial = out / "draft.tar.partial"
    with tarfile.open(partial, "w") as archive:
        for name in _DRAFT_FILES:
            if (folder / name).is_file():
                archive.add(folder / name, name)
    partial.replace(out / "draft.tar")
    return (out / "draft.tar").stat().st_size
