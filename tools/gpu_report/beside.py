"""Run graphs of a target and of its draft side by side in one process: what does each cost the other?"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ssd.draft.rehearsal import Rehearsal
from ssd.draft.static_shapes import TreeRunner
from ssd.execution.batch import Row as Tokens
from ssd.execution.static import StaticRunner
from ssd.launch.resolve import resolve
from ssd.speculation.sampling import Drawing
from ssd.verifier.loading import load
from tools.gpu_report.draft_steps import drafting
from tools.gpu_report.green import Work, captured_on, green_streams
from tools.gpu_report.job import Job, Row
from tools.gpu_report.pairs import cases

_LOOKAHEAD, _CHAINS, _CONTEXT, _TURNS = 5, 16, 512, 12
_CACHE_BYTES = 2**31
_PARTS = (8, 16, 24, 32)


class _Pair(NamedTuple):
    """Two streams, and what of the target and of the draft was captured on each."""

    streams: tuple[torch.cuda.Stream, torch.cuda.Stream]
    replays: tuple[Work, Work]

    @classmethod
    def of(cls, works: tuple[Work, Work], streams: tuple[torch.cuda.Stream, torch.cuda.Stream]) -> _Pair:
        target, draft = (captured_on(work, stream) for work, stream in zip(works, streams, strict=True))
        return cls(streams, (target, draft))


def rows(job: Job, *, pairs: Sequence[str] = ("llama-8b small", "qwen3-32b 0.6b")) -> Iterator[Row]:
    """Yield milliseconds of a verification (`verify_ms`) and of a draft's depth: alone, in turn, and side by side.

    Side by side the draft computes all the time: on two streams, with a priority for either, and with a part of the
    multiprocessors for the draft (green contexts). `over_alone` is the verification's, `of_verify` a depth's share."""
    if job.device == "cpu":
        yield {"name": "not run", "why": "graphs need a GPU"}
        return
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        few = {"kv_cache_memory_bytes": _CACHE_BYTES}  # both pairs fit in memory
        for case in cases(job, Path(folder), 1, pairs, (job.device,), few):
            config = resolve(case.options)
            runner, _ = load(config)
            engine = drafting(config)
            tree = engine.drafter.runner
            assert isinstance(runner, StaticRunner) and isinstance(tree, TreeRunner)
            pages = range(-(-_CONTEXT // config.page_size) + 1)
            runner.forward([Tokens([1] * (1 + _LOOKAHEAD), _CONTEXT - 1 - _LOOKAHEAD, pages, 1 + _LOOKAHEAD)])
            rehearsal = Rehearsal(engine.drafter, _CHAINS, _CONTEXT)
            rehearsal.step()  # fills the batch
            context = runner.prepare([Tokens([1] * (1 + _LOOKAHEAD), _CONTEXT - 1 - _LOOKAHEAD, pages)])
            shape = tree.shape(tree.rows([], rehearsal._rows))
            assert shape is not None
            works = context.parts[0][0]._forward, tree._steps[shape].ranked[Drawing.GREEDY]._compute
            for row in _found(job, works):
                yield {**row, "name": f"{case.name}, {row['name']}"}
            del runner, engine, tree, works, context, rehearsal
            torch.cuda.empty_cache()


def _found(job: Job, works: tuple[Work, Work]) -> Iterator[Row]:
    usual = torch.cuda.Stream(), torch.cuda.Stream()
    pair = _Pair.of(works, usual)
    alone = tuple(_seconds(work, stream) for work, stream in zip(pair.replays, usual, strict=True))
    yield _row("alone", *alone, alone[0])
    in_turn = _seconds(lambda: (pair.replays[0](), *(pair.replays[1]() for _ in range(_LOOKAHEAD))), usual[0])  # type: ignore[arg-type, func-returns-value]
    yield {"name": f"one stream, {_LOOKAHEAD} depths a round", "round_ms": 1e3 * in_turn}
    streams: dict[str, Callable[[], tuple[torch.cuda.Stream, torch.cuda.Stream]]] = {
        "two streams": lambda: usual,
        "the target first": lambda: (torch.cuda.Stream(priority=-1), torch.cuda.Stream()),
        "the draft first": lambda: (torch.cuda.Stream(), torch.cuda.Stream(priority=-1)),
    }
    for name, made in streams.items():
        yield _row(name, *_beside(_Pair.of(works, made()), alone), alone[0])
    for count in _PARTS:
        if job.left() <= 0:
            return
        try:
            own, others, size = green_streams(count)
            yield _row(f"green, {size} for the draft", *_beside(_Pair.of(works, (others, own)), alone), alone[0])
        except RuntimeError as error:
            yield {"name": f"green, {count} for the draft", "failed": str(error).splitlines()[0], "ok": False}
            return


def _row(name: str, verify: float, depth: float, alone: float) -> Row:
    found = {"verify_ms": 1e3 * verify, "depth_ms": 1e3 * depth}
    return {"name": name, **found, "over_alone": verify / alone, "of_verify": depth / verify}


def _seconds(work: Work, stream: torch.cuda.Stream) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        work()
        begin.record()
        for _ in range(_TURNS):
            work()
        end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / _TURNS


def _beside(pair: _Pair, alone: Sequence[float]) -> tuple[float, float]:
    """Return the seconds of a verification and of a depth while both streams are busy."""
    each = max(1, math.ceil(1.5 * alone[0] / max(alone[1], 1e-6)))
    begin, end, *marks = (torch.cuda.Event(enable_timing=True) for _ in range(_TURNS + 3))
    torch.cuda.synchronize()
    for stream, event in zip(pair.streams, (begin, marks[0]), strict=True):
        event.record(stream)
    for mark in marks[1:]:
        with torch.cuda.stream(pair.streams[1]):
            for _ in range(each):
                pair.replays[1]()
            mark.record()
        with torch.cuda.stream(pair.streams[0]):
            pair.replays[0]()
    end.record(pair.streams[0])
    torch.cuda.synchronize()
    verify = begin.elapsed_time(end) / 1e3
    ends = [marks[0].elapsed_time(mark) / 1e3 for mark in marks[1:]]
    inside = [at for at in ends if at <= verify] or ends[:1]
    return verify / _TURNS, inside[-1] / len(inside) / each
