"""Time a draft's tree steps alone, by chains and cores, and profile them: what of a depth is the device's part?"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import torch

from ssd.config.engine import EngineConfig
from ssd.draft.engine import DraftEngine
from ssd.draft.process import load, take_memory
from ssd.draft.rehearsal import Rehearsal
from ssd.ipc.board import BoardWriter, size_bytes
from ssd.ipc.process import memory_file
from ssd.launch.resolve import resolve
from tools.gpu_report.job import Job, Row
from tools.gpu_report.pairs import cases
from tools.gpu_report.timing import timed, wait

_TEXT, _REPEATS, _MOST_S = 512, 15, 0.5


def rows(
    job: Job,
    *,
    pairs: Sequence[str] = ("llama-8b small",),
    draft_device: str = "",
    chains: Sequence[int] = (1, 4, 8, 16, 32),
    cores: Sequence[int] = (),
    depths: int = 1,
    profile: bool = False,
) -> Iterator[Row]:
    """Yield milliseconds of a step of `depths` depths, for the draft of each pair, number of chains and of `cores`.

    `host_ms` is CPU time of this thread. `profile`: `device_ms` is the time in kernels, `launches` is their number."""
    device = draft_device or job.draft_devices[0]
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        for case in cases(job, Path(folder), 2, pairs, (device,), {}):
            engine = drafting(resolve(case.options))
            available = len(os.sched_getaffinity(0))
            for count in sorted({min(each, available) for each in cores}) or (torch.get_num_threads(),):
                torch.set_num_threads(count)
                for number in chains:
                    if job.left() <= 0:
                        return
                    rehearsal = Rehearsal(engine.drafter, number, _TEXT)
                    with closing(rehearsal):
                        step = partial(_step, engine, rehearsal, depths)
                        began = time.perf_counter()
                        step()
                        often = max(1, min(_REPEATS, int(_MOST_S / (time.perf_counter() - began))))
                        seconds, _ = timed(step, torch.device(device), often)
                        found = {"ms": 1e3 * seconds, "ms_a_depth": 1e3 * seconds / depths}
                        if profile:
                            found |= _profiled(step, torch.device(device))
                    name = f"draft of {case.name}, {number} chains, {depths} depths"
                    yield {"name": f"{name}, {count} cores" if cores else name, **found}


def drafting(config: EngineConfig) -> DraftEngine:
    """Return a draft's engine in this process, with a board that nobody reads."""
    runners = load(config)
    take_memory(runners)
    board = BoardWriter(memory_file("board", size_bytes(config.max_num_seqs)), config.max_num_seqs)
    return DraftEngine(config, runners, board, 0, config.vocab_size)


def _step(engine: DraftEngine, rehearsal: Rehearsal, depths: int) -> None:
    """Guess `depths` tokens after every chain: in one step, or in one of each depth where the drafter has no other."""
    chains = rehearsal._rows
    each = [depths - 1] * sum(len(rows.tokens) for _, rows in chains)
    if depths > 1 and engine.drafter.goes_on and engine.drafter.several([], chains, each) is not None:
        return
    for _ in range(depths):
        list(engine.drafter.forward([], chains))


def _profiled(step: partial[None], device: torch.device) -> Row:
    began = time.thread_time()
    step()
    host = time.thread_time() - began
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        step()
        wait(device)
    kernels = [event for event in profile.key_averages() if event.self_device_time_total > 0]
    device_ms = sum(event.self_device_time_total for event in kernels) / 1e3
    return {"host_ms": 1e3 * host, "device_ms": device_ms, "launches": sum(event.count for event in kernels)}
