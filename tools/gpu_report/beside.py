"""Run graphs of a target and of its draft side by side in one process: what does each cost the other?"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ssd.draft.rehearsal import Rehearsal
from ssd.draft.static_shapes import TreeRunner
from ssd.execution.batch import Row as Tokens
from ssd.execution.static import StaticContext
from ssd.launch.resolve import resolve
from ssd.speculation.sampling import Drawing
from ssd.verifier.loading import load
from tools.gpu_report.draft_steps import drafting
from tools.gpu_report.green import Work, captured_on, green_streams
from tools.gpu_report.job import Job, Row
from tools.gpu_report.pairs import cases

_LOOKAHEAD, _CHAINS, _CONTEXT, _TURNS = 5, 16, 512, 12
_CACHE_BYTES = 2**31  # so that both pairs fit in memory
_PARTS = (8, 16, 24, 32)

_Streams = tuple[torch.cuda.Stream, torch.cuda.Stream]


def rows(job: Job, *, pairs: Sequence[str] = ("llama-8b small", "qwen3-32b 0.6b")) -> Iterator[Row]:
    """Yield milliseconds of a verification and of a depth of the draft: alone, in turn, and side by side.

    Side by side the draft computes all the time: on two streams, with a priority for either, and with a part of the
    multiprocessors for the draft (green contexts). `over_alone` is the verification's, `of_verify` a depth's share."""
    if job.device == "cpu":
        yield {"name": "not run", "why": "graphs need a GPU"}
        return
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        for case in cases(job, Path(folder), 1, pairs, (job.device,), {"kv_cache_memory_bytes": _CACHE_BYTES}):
            config = resolve(case.options)
            runner, engine = load(config)[0], drafting(config)
            text = [Tokens([1] * (1 + _LOOKAHEAD), _CONTEXT, range(_CONTEXT // config.page_size + 1), 1 + _LOOKAHEAD)]
            rehearsal, context = Rehearsal(engine.drafter, _CHAINS, _CONTEXT), runner.prepare(text)
            runner.forward(text, context)  # both fill their batches
            rehearsal.step()
            tree = engine.drafter.runner
            assert isinstance(context, StaticContext) and isinstance(tree, TreeRunner)
            ((_, shape),) = tree.batches(tree.rows([], rehearsal._rows))
            works = context.parts[0][0]._forward, tree._steps[shape].ranked[Drawing.GREEDY]._compute
            yield from ({**row, "name": f"{case.name}, {row['name']}"} for row in _found(job, works))


def _found(job: Job, works: tuple[Work, Work]) -> Iterator[Row]:
    usual = torch.cuda.Stream(), torch.cuda.Stream()
    target, draft = (captured_on(work, stream) for work, stream in zip(works, usual, strict=True))
    alone = _seconds([target], usual[0]), _seconds([draft], usual[1])

    def row(name: str, verify: float, depth: float) -> Row:
        found = {"verify_ms": 1e3 * verify, "depth_ms": 1e3 * depth}
        return {"name": name, **found, "over_alone": verify / alone[0], "of_verify": depth / verify}

    yield row("alone", *alone)
    in_turn = _seconds([target, *[draft] * _LOOKAHEAD], usual[0])
    yield {"name": f"one stream, {_LOOKAHEAD} depths a round", "round_ms": 1e3 * in_turn}
    yield row("two streams", *_beside((target, draft), usual, alone))
    first = torch.cuda.Stream(priority=-1)
    for name, streams in {"the target first": (first, usual[1]), "the draft first": (usual[0], first)}.items():
        yield row(name, *_beside(_captured(works, streams), streams, alone))
    for count in _PARTS:
        if job.left() <= 0:
            return
        try:
            own, others, size = green_streams(count)
            streams = others, own
            yield row(f"green, {size} for the draft", *_beside(_captured(works, streams), streams, alone))
        except RuntimeError as error:
            yield {"name": f"green, {count} for the draft", "failed": str(error).splitlines()[0], "ok": False}
            return


def _captured(works: tuple[Work, Work], streams: _Streams) -> tuple[Work, Work]:
    return captured_on(works[0], streams[0]), captured_on(works[1], streams[1])


def _seconds(replays: Sequence[Work], stream: torch.cuda.Stream) -> float:
    """Return the seconds of the replays, one after the other on a stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        for turn in range(1 + _TURNS):
            if turn == 1:
                begin.record()
            for replay in replays:
                replay()
        end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / _TURNS


def _beside(replays: tuple[Work, Work], streams: _Streams, alone: tuple[float, float]) -> tuple[float, float]:
    """Return the seconds of a verification and of a depth while both streams are busy."""
    each = max(1, math.ceil(1.5 * alone[0] / max(alone[1], 1e-6)))  # the draft ends last
    begin, end, *marks = (torch.cuda.Event(enable_timing=True) for _ in range(3 + _TURNS))
    torch.cuda.synchronize()
    begin.record(streams[0])
    marks[0].record(streams[1])
    for mark in marks[1:]:
        with torch.cuda.stream(streams[1]):
            for _ in range(each):
                replays[1]()
            mark.record()
        with torch.cuda.stream(streams[0]):
            replays[0]()
    end.record(streams[0])
    torch.cuda.synchronize()
    verify = begin.elapsed_time(end) / 1e3
    ends = [marks[0].elapsed_time(mark) / 1e3 for mark in marks[1:]]
    inside = [at for at in ends if at <= verify] or ends[:1]
    return verify / _TURNS, inside[-1] / len(inside) / each
