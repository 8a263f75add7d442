"""Let the target write a corpus with `tools.distill` for as long as there is time (tools/gpu_report/README.md)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors import safe_open

from ssd.launch.mps import service
from tools.gpu_report import distilling
from tools.gpu_report.job import Job, Row

# What processes need behind the time in which they write: a last token, and their shards on the disk.
_END_S = 12.0
_SHOWN_S = 20.0


def rows(
    job: Job,
    *,
    seconds: float = 250.0,
    processes: int = 8,
    batch: int = 256,
    mps: bool = False,
    tiny: bool = False,
) -> Iterator[Row]:
    """Write for `seconds`, or until the limit comes near; yield what is there now and again.

    Shards are on the disk as they are done, and the next step trains on those that are there. `batch`: texts at a time
    of each process. `mps`: the processes share the GPU under a service of their own; else they take turns."""
    recipe = distilling.recipe(job, tiny)
    if recipe.tiny:
        seconds, processes, batch = min(seconds, 60.0), min(processes, 2), min(batch, 8)
    processes = min(processes, len(os.sched_getaffinity(0)))
    batch = min(batch, _most_texts(job, processes))
    began, shown = time.monotonic(), time.monotonic()
    limit = max(1.0, min(seconds, job.left() - _END_S))
    more = ("--until", "corpus", "--write-seconds", f"{limit:.0f}", "--workers", str(processes), "--batch", str(batch))
    work = recipe.out / "work"
    command = recipe.command(job.device, *more)
    with (
        service() if mps and job.device.startswith("cuda") else nullcontext(dict[str, str]()) as variables,
        distilling.started("tools.distill", command, variables) as process,
    ):
        for _ in distilling.ticks(process, job):
            if distilling.since(shown) > _SHOWN_S:
                shown = time.monotonic()
                yield {"name": "corpus so far", "seconds": distilling.since(began)} | counted(work)
        state = distilling.ended(process)
    taken, found = distilling.since(began), counted(work)
    written = {"tokens_s": found["answer_tokens"] / taken, "processes": processes, "batch": batch}
    fine = state == "done" and found["conversations"] > 0
    yield {"name": "corpus", "state": state, "seconds": taken} | found | written | {"ok": fine}


def counted(work: Path) -> dict[str, int]:
    """Return how many shards, conversations and tokens there are in a corpus folder."""
    shards = sorted(work.glob("corpus-*.safetensors"))
    conversations = tokens = prompts = 0
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            lengths = file.get_tensor("lengths")
            conversations += len(lengths)
            tokens += int(lengths.sum())
            prompts += int(file.get_tensor("prompt_lengths").sum())
    return {"shards": len(shards), "conversations": conversations, "tokens": tokens, "answer_tokens": tokens - prompts}


def _most_texts(job: Job, processes: int) -> int:
    """Return how many texts at a time fit a process's share of the device's memory: 30 MiB each, and 2 GiB besides."""
    if not job.device.startswith("cuda"):
        return 2**20
    share = int(torch.cuda.get_device_properties(job.device).total_memory * 0.9) // processes
    return max(16, (share - 2**31) // (30 * 2**20))
