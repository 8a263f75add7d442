"""Count what the host launches in a round of `sd`, and time it: a draft in the target's process, and one apart."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ssd.config.engine import EngineConfig
from ssd.config.params import SamplingParams
from ssd.draft.rehearsal import Rehearsal
from ssd.execution.batch import Row as Tokens
from ssd.ipc.board import BoardReader, Cached, size_bytes
from ssd.ipc.messages import Submit
from ssd.ipc.process import memory_file
from ssd.launch.resolve import resolve
from ssd.law import Law
from ssd.verifier.engine import TargetEngine
from ssd.verifier.inline_proposer import inline
from ssd.verifier.loading import load
from ssd.verifier.overlap import overlapped
from ssd.verifier.suffix_memory import SuffixMemory
from ssd.verifier.verification import PlainVerification
from tools.gpu_report.draft_steps import _step, drafting
from tools.gpu_report.job import Job, Row
from tools.gpu_report.pairs import STATED, cases

_CONTEXT, _BEGIN, _ROUNDS = 64, 8, 40
_CACHE_BYTES = 2**31


class _Launches(TorchDispatchMode):
    """Counts operations that the host sends to a device: graphs, and what is in none."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        view = any(out.alias_info is not None and not out.alias_info.is_write for out in func._schema.returns)
        _Launches.count += not view and any(isinstance(each, torch.Tensor) and each.is_cuda for each in (found, *args))
        return found


class _Graph(torch.cuda.CUDAGraph):
    """Counts its launches."""

    def replay(self) -> None:
        _Launches.count += 1
        super().replay()


def rows(
    job: Job, *, pairs: Sequence[str] = ("llama-8b small",), batches: Sequence[int] = (1, 16), temperature: float = 0.0
) -> Iterator[Row]:
    """Yield for each pair and batch the launches of a round and its host time, as medians.

    `host_us` is the time of this thread, waits for the device excluded only as far as they sleep. A draft apart is
    counted without its messages and its search for the next chains."""
    if job.device == "cpu":
        yield {"name": "not run", "why": "graphs need a GPU"}
        return
    torch.cuda.CUDAGraph = _Graph  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        given = {"kv_cache_memory_bytes": _CACHE_BYTES, "mode": "sd"}
        for case in cases(job, Path(folder), max(batches), pairs, (job.device,), given):
            config = resolve(case.options)
            yield from _in_one_stream(config, f"{case.name}, one stream", batches, temperature)
            yield from _apart(config, f"{case.name}, draft apart", batches)


def _in_one_stream(config: EngineConfig, name: str, batches: Sequence[int], temperature: float) -> Iterator[Row]:
    runner = load(config)[0]
    reader = BoardReader(memory_file("board", size_bytes(config.max_num_seqs)), config.max_num_seqs, config.vocab_size)
    plain = PlainVerification(runner)
    proposer = inline(config, plain, reader, SuffixMemory.of(config))
    assert proposer is not None, "there was room for the draft"
    device = proposer.device
    engine = TargetEngine(config, overlapped(plain, config, reader, proposer.asks, device), proposer)
    report = device.report

    def whole(rows: int) -> tuple[list[int], list[Cached]]:  # a stand-in for a device computes nothing
        return report(rows)[0], [Cached(0, [0] * STATED.lookahead)] * rows

    if "fake" in torch.cuda.get_device_name():
        device.report = whole  # type: ignore[method-assign]
    for batch in batches:
        for request in range(batch):
            params = SamplingParams(temperature, seed=request, max_tokens=900, ignore_eos=True)
            engine.submit(Submit(request, [1] * _CONTEXT, params))
        for _ in range(_BEGIN):
            engine.step()
        yield {"name": f"{name}, batch {batch}", **_measured(engine.step)}
        engine.abort_all()


def _apart(config: EngineConfig, name: str, batches: Sequence[int]) -> Iterator[Row]:
    runner, engine = load(config)[0], drafting(config)
    lookahead = STATED.lookahead
    for batch in batches:
        pages = range(_CONTEXT // config.page_size + 2)
        texts = [Tokens([1] * (1 + lookahead), _CONTEXT, pages, 1 + lookahead, slot) for slot in range(batch)]
        verify = partial(runner.sample, texts, [Law()] * batch)
        with closing(Rehearsal(engine.drafter, batch, _CONTEXT)) as rehearsal:
            draft = partial(_step, engine, rehearsal, lookahead)
            for of, work in (("verification", verify), ("speculation", draft)):
                yield {"name": f"{name}, batch {batch}, {of}", **_measured(work)}


def _measured(work: Callable[[], object]) -> Row:
    seconds, launches = list[float](), list[int]()
    for turn in range(_ROUNDS):
        began = time.thread_time()
        if turn % 2:
            before = _Launches.count
            with _Launches():
                work()
            launches.append(_Launches.count - before)
        else:
            work()
            seconds.append(time.thread_time() - began)
    return {"launches": int(median(launches)), "host_us": round(1e6 * median(seconds))}
