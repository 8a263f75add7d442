"""Measure modes, each with an engine of its own: speed, where target and draft spend time, why look-ups miss."""

from __future__ import annotations

import itertools
import re
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from ssd.client import Client, Prompt
from ssd.config.params import Mode, SamplingParams, Speculation
from ssd.ipc.trace_ring import Moment, Span, State
from ssd.launch import mps
from ssd.launch.resolve import resolve
from ssd.plugins.bench.datasets import random_ids
from tools.gpu_report.health import watched
from tools.gpu_report.job import Job, Row
from tools.gpu_report.pairs import Case, cases

if TYPE_CHECKING:
    from tools.gpu_report.listener import Listener

_SETTLES_S = 0.3
_USUAL = ((32,),)

_Setting = tuple[int, Sequence[int], float]
Traces = Mapping[str, tuple[list[Span], list[Moment]]]


def rows(
    job: Job,
    *,
    pairs: Sequence[str] = ("llama-8b small",),
    draft_devices: Sequence[str] = (),
    modes: Sequence[Mode] = ("ar", "sd", "ssd"),
    batches: Sequence[int] = (1,),
    lengths: Sequence[Sequence[int]] = _USUAL,
    temperatures: Sequence[float] = (0.0,),
    tokens: int = 256,
    repeats: int = 3,
    share: int = 0,
    options: Mapping[str, Any] | None = None,
) -> Iterator[Row]:
    """Yield a row for each pair, draft device, mode, batch, mix of prompt `lengths` and temperature.

    `pairs`, and by default the draft devices, are those of `cases`; `options` are further ones of the engine.
    `share`: both processes run under MPS, the draft with this percentage; a variable of the environment would be for
    the target, too.

    Every run has other prompts. The first run is not in `tok_s`, the median of the `repeats` after it; `runs` are all
    speeds in order. Look-ups and shares of time by state are those of the last run, whose trace is in `out`, for
    Perfetto. `prompt_ms`: median and longest steps of the draft with prompts, in the first run and in the last."""
    given = dict(options or {})
    if share and job.device != "cpu":
        mps.DRAFT_SHARE, given["mps"] = share, True
    if job.tiny:
        draft_devices, batches, tokens, repeats = (), batches[:1], 32, 1
    devices, settings = draft_devices or job.draft_devices, list(itertools.product(batches, lengths, temperatures))
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(job, Path(folder), max(batches), pairs, devices, given):
            for mode in modes:
                if job.left() <= 0:
                    yield {"name": f"{case.name}, {mode}", "not_run": "no time left"}
                    continue
                try:
                    yield from _of_mode(job, case, mode, settings, tokens, repeats)
                except Exception as error:
                    traceback.print_exc()
                    yield {"name": f"{case.name}, {mode}", "failed": f"{type(error).__name__}: {error}", "ok": False}


def _of_mode(
    job: Job, case: Case, mode: Mode, settings: Sequence[_Setting], tokens: int, repeats: int
) -> Iterator[Row]:
    from tools.gpu_report.listener import Listener  # reads with a plugin, which the list of parts does without

    # An engine whose own mode is `sd` drafts in its target's process alone, one in `auto` there and on the host.
    asked = msgspec.structs.replace(case.options, mode=mode if mode in ("sd", "auto") else "ssd")
    config, began = msgspec.structs.replace(resolve(asked), synthetic=case.synthetic), time.monotonic()
    seeds = itertools.count()
    with watched(job, config) as (engine, client, health), closing(Listener(engine.address)) as listener:
        yield {"name": f"{case.name}, {mode}, start", "seconds": time.monotonic() - began}
        for batch, mix, temperature in settings:
            count = (1 + repeats) * batch
            sizes = [mix[index % len(mix)] for index in range(count)]
            prompts: list[Prompt] = [random_ids(1, size, config.vocab_size, next(seeds))[0] for size in sizes]
            if case.synthetic is None:
                prompts = job.asked(count)
            run = partial(_run, client, mode=mode, temperature=temperature, tokens=tokens)
            found = _measured(run, [prompts[at : at + batch] for at in range(0, count, batch)], listener)
            of = "" if mix in _USUAL else f"prompts of {' '.join(map(str, mix))}, "
            yield health.judged({"name": f"{case.name}, batch {batch}, {of}T = {temperature:g}, {mode}", **found})
    file = Path(job.out) / f"trace-{re.sub('[^a-z0-9]+', '-', f'{job.step} {case.name} {mode}'.lower())}.json"
    listener.write(file, mode)


def _measured(run: Callable[[Sequence[Prompt]], Row], batches: Sequence[Sequence[Prompt]], listener: Listener) -> Row:
    """Run the batches one after the other; return what `rows` says of them."""
    found, steps = list[Row](), list[str]()
    for number, prompts in enumerate(batches):
        begin = time.monotonic_ns()
        found.append(run(prompts))
        end = time.monotonic_ns()
        if number in (0, len(batches) - 1):
            time.sleep(_SETTLES_S)
            listener.keep(begin, end)
            spans = [span for span in listener.last["draft"][0] if span.state == State.PREFILL]
            took = sorted((span.end - span.begin) / 1e6 for span in spans)
            steps.append(f"{took[len(took) // 2]:.1f}, {took[-1]:.1f}" if took else "none")
    speeds = [each["tok_s"] for each in found]
    told = {"tok_s": median(speeds[1:]), "runs": " ".join(f"{speed:.0f}" for speed in speeds)}
    return {**found[-1], **told, "prompt_ms": "; ".join(steps), **_summary(listener.last)}


def _run(client: Client, prompts: Sequence[Prompt], mode: Mode, temperature: float, tokens: int) -> Row:
    speculation = Speculation(mode, 5, (3,), "jit")
    params = SamplingParams(temperature, seed=0, max_tokens=tokens, ignore_eos=True, speculation=speculation)
    began = time.perf_counter()
    metrics = [answer.metrics for answer in client.generate(prompts, params)]
    seconds = time.perf_counter() - began
    return {
        "tok_s": len(prompts) * tokens / seconds,
        "a_round": sum(m.mean_acceptance_length for m in metrics) / len(metrics),
        "drafted": sum(m.drafted_tokens for m in metrics),
        "rounds": sum(m.rounds for m in metrics),
        "verify_ms": sum(m.verify_ms for m in metrics) / len(metrics),
        "wait_ms": sum(m.draft_wait_ms for m in metrics) / len(metrics),
        "depth_ms": metrics[-1].draft_step_ms,
    }


def _summary(traces: Traces) -> Row:
    """Return look-ups by result, and for each role the share of time and the median milliseconds of its states."""
    seen = (moment.mark for _, moments in traces.values() for moment in moments)
    marks = Counter(mark.name.lower() for mark in seen if mark.of_look_up)
    found: Row = {"look_ups": " ".join(f"{name}={count}" for name, count in marks.most_common())}
    for role, (states, _) in traces.items():
        spans: dict[str, list[int]] = {}
        for span in states:
            spans.setdefault(span.state.name.lower(), []).append(span.end - span.begin)
        whole = sum(map(sum, spans.values())) or 1
        said = {name: f"{sum(own) / whole:.0%}*{sorted(own)[len(own) // 2] / 1e6:.2f}" for name, own in spans.items()}
        found[role] = " ".join(f"{name}={share}" for name, share in said.items())
    return found
