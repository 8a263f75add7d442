"""Train a draft on the corpus that is there, and pack both for the way back (tools/gpu_report/README.md)."""

from __future__ import annotations

import io
import json
import lzma
import os
import tarfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save

from tools.distill.job import HELD_OUT_FILE
from tools.gpu_report import distilling
from tools.gpu_report.corpus import counted
from tools.gpu_report.job import Job, Row
from tools.gpu_report.pieces import CARRIED

# What the command needs besides the time in which it trains: to read the corpus before, to write the draft behind it.
_AROUND_S = 35.0
# Most bytes of a file that comes back.
_MOST = 15 * 2**20
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
# Of a shard, what labels can be made of again.
_KEPT = ("token_ids", "lengths", "prompt_lengths", "openings")


def rows(
    job: Job,
    *,
    seconds: float = 110.0,
    batch_tokens: int = 16384,
    learning_rate: float = 4e-3,
    epochs: int = 3,
    files: int = 2,
    tiny: bool = False,
) -> Iterator[Row]:
    """Train for at most `seconds` while the corpus is packed; yield what each epoch brought.

    A corpus that the call carries is unpacked in place of one written before. Leaves draft.tar, and of a corpus that
    was written there corpus-N.tar in at most `files` files."""
    recipe = distilling.recipe(job, tiny)
    work = recipe.out / "work"
    if carried := sorted(CARRIED.glob("corpus-*.tar")):
        yield {"name": "carried corpus"} | unpacked(carried, work)
    limit = max(1.0, min(seconds, job.left() - _AROUND_S))
    more = ["--until", "train", "--write-seconds", "0", "--train-seconds", f"{limit:.0f}", "--epochs", str(epochs)]
    if not recipe.tiny:
        more += ["--batch-tokens", str(batch_tokens), "--learning-rate", str(learning_rate)]
    began = time.monotonic()
    with distilling.started("tools.distill", recipe.command(job.device, *more)) as process:
        for number, packed in enumerate(() if carried else pack_corpus(work, Path(job.out), files)):
            yield {"name": f"corpus-{number}.tar"} | packed
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


def pack_corpus(work: Path, out: Path, files: int) -> Iterator[dict[str, int]]:
    """Pack the texts of a corpus, each shard by itself; yield what each file has.

    A member is the shard without what the target can compute again: safetensors, xz, token ids in 16 bits. Shards
    beyond `files` files are left out."""
    shards = sorted(work.glob("corpus-*.safetensors"))
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2)) as pool:  # lzma holds no lock
        members = iter(list(zip(shards, pool.map(packed_shard, shards), strict=True)))
    waiting = next(members, None)
    for number in range(files):
        if waiting is None:
            return
        size = count = 0
        with tarfile.open(out / f"corpus-{number}.tar", "w") as archive:
            while waiting is not None and (not count or size + len(waiting[1]) < _MOST):
                member = tarfile.TarInfo(f"{waiting[0].name}.xz")
                member.size = len(waiting[1])
                archive.addfile(member, io.BytesIO(waiting[1]))
                size, count, waiting = size + len(waiting[1]) + 1024, count + 1, next(members, None)
        left = 0 if waiting is None else 1 + len(list(members)) if number == files - 1 else 0
        yield {"bytes": size, "shards": count, "left_out": left}


def packed_shard(shard: Path) -> bytes:
    with safe_open(shard, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in _KEPT}
        metadata = file.metadata()
    if int(tensors["token_ids"].max()) < 2**16:
        tensors["token_ids"] = tensors["token_ids"].to(torch.uint16)
    return lzma.compress(save(tensors, metadata), preset=6)


def unpacked(archives: Sequence[Path], work: Path) -> dict[str, int]:
    """Unpack what `pack_corpus` left into a folder; return what it has. A shard lacks its labels."""
    work.mkdir(parents=True, exist_ok=True)
    for path in archives:
        with tarfile.open(path) as archive:
            for member in archive:
                content = archive.extractfile(member)
                assert content is not None
                (work / Path(member.name).stem).write_bytes(lzma.decompress(content.read()))
    return counted(work)
