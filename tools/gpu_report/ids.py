"""Check that every mode has the ids of `ar`, bit for bit, also while drafts are killed."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import product

from msgspec import structs

from ssd.client import Client, Completion, Prompt
from ssd.config import gpus
from ssd.config.emulation import DeviceTimes, ForwardTime
from ssd.config.engine import InlineDraft
from ssd.config.params import Mode, SamplingParams, Speculation
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.restarts import Restarts
from ssd.launch.supervisor import Engine
from tools.gpu_report.health import watched
from tools.gpu_report.job import Job, Row

_PATIENCE_S = 30.0
_LONGEST_LIFE_S = 1.0
_LEAK_BYTES = 2**26
# The modes of each engine, and where its draft is; the last mode is its own.
_ENGINES: tuple[tuple[tuple[Mode, ...], InlineDraft], ...] = (
    (("ar", "sd"), "auto"),
    (("sd",), "off"),
    (("ssd",), "off"),
)
_TINY_TIMES = DeviceTimes(ForwardTime(0.02), ForwardTime(0.0))
_COUNTED = ("rounds", "drafted_tokens", "accepted_tokens", "hits", "misses")


def rows(
    job: Job, *, texts: int = 100, tokens: int = 64, kills: int = 100, deterministic: bool = True, mps: bool = False
) -> Iterator[Row]:
    """Ask `texts` of `tokens` in every mode, then kill the draft of `ssd` `kills` times.

    Each drafting mode has an engine of its own, since a draft that was left alone stays so for a while. `sd` has two
    where its draft may be in the target's process. T = 1 comes first: made pairs agree more there. Ids of a
    deterministic engine must be those of `ar`; without it, on a GPU, differences are counted alone. `mps`: target and
    draft run under CUDA's MPS."""
    count, tokens, kills = (4, 32, 3) if job.tiny else (texts, tokens, kills)
    options = EngineOptions(
        target=job.target,
        load_format=job.load_format,
        draft=(job.draft,),
        device=job.device,
        draft_device=job.draft_devices[0],
        dtype=job.dtype,
        deterministic=deterministic,
        mps=mps,
        max_num_seqs=4 if job.tiny else 16,
        max_model_len=128 if job.tiny else 1024,
        num_speculative_tokens=4,
        fan_out=(3,),
        suffix_memory=0,
    )
    prompts, expected = job.asked(count), dict[float, list[list[int]]]()
    for modes, inline in _ENGINES:
        restarts = Restarts(per_minute=float("inf"), longest=0.1)
        config = resolve(structs.replace(options, mode=modes[-1], inline_draft=inline))
        if modes == ("sd",) and job.device == "cpu":  # as the engine before
            continue
        if job.tiny and job.device == "cpu":  # else a busy machine's draft is always late
            config = structs.replace(config, emulate=_TINY_TIMES)
        with watched(job, config, restarts) as (engine, client, health):
            for mode, temperature in product(modes, (1.0, 0.0)):
                answers = _answers(client, prompts, mode, temperature, tokens)
                found = [answer.token_ids for answer in answers]
                if mode == "ar":
                    expected[temperature] = found
                    continue
                equal = sum(a == b for a, b in zip(found, expected[temperature], strict=True))
                place = " in the target's process" if mode == "sd" and config.inline_draft else ""
                name = f"{mode}{place}, T = {temperature:g}, {job.dtype}{', deterministic' if deterministic else ''}"
                counts = {field: sum(getattr(answer.metrics, field) for answer in answers) for field in _COUNTED}
                # Equal texts without draft tokens show nothing.
                judged = {"ok": equal == len(found) and counts["accepted_tokens"] > 0} if deterministic else {}
                yield health.judged({"name": name, "texts": len(found), "equal": equal, **counts, **judged})
            if kills and "ssd" in modes:
                for row in _killed(job, engine, client, prompts[:4], expected[1.0][:4], tokens, kills):
                    yield health.judged(row)


def _answers(
    client: Client, prompts: Sequence[Prompt], mode: Mode, temperature: float, tokens: int
) -> Sequence[Completion]:
    params = [
        SamplingParams(
            temperature, seed=index, max_tokens=tokens, ignore_eos=True, speculation=Speculation(mode, 4, (3,), "jit")
        )
        for index in range(len(prompts))
    ]
    return client.generate(prompts, params)


def _killed(
    job: Job,
    engine: Engine,
    client: Client,
    prompts: Sequence[Prompt],
    expected: list[list[int]],
    tokens: int,
    kills: int,
) -> Iterator[Row]:
    """Kill drafts at random moments of their work, and ask the same prompts again and again."""
    free, dice, deaths = _free(), random.Random(0), 0
    over, drafts = threading.Event(), threading.Event()

    def kill() -> None:
        nonlocal deaths
        while deaths < kills and job.left() > _PATIENCE_S / 2 and not over.is_set():
            if not drafts.wait(0.1):  # it loads: on a GPU that takes longer than any delay here
                continue
            over.wait(dice.uniform(0.0, _LONGEST_LIFE_S))
            if (pid := engine.pids.get("draft")) is not None:
                drafts.clear()
                os.kill(pid, signal.SIGKILL)
                deaths += 1

    thread = threading.Thread(target=kill)
    thread.start()
    answers = altered = 0
    try:
        while thread.is_alive() or not answers:
            said = _answers(client, prompts, "ssd", 1.0, tokens)
            found = [answer.token_ids for answer in said]
            if any(answer.metrics.drafted_tokens for answer in said):
                drafts.set()
            answers += len(found)
            altered += sum(a != b for a, b in zip(found, expected, strict=True))
            yield _row(kills, deaths, answers, altered, None)
    finally:
        over.set()
        thread.join()
    _wait_for_draft(client, prompts[0], job)
    after = _free()
    leaked = None if free is None or after is None else max(0, sum(free) - sum(after))
    yield _row(kills, deaths, answers, altered, leaked)


def _row(wanted: int, deaths: int, answers: int, altered: int, leaked: int | None) -> Row:
    row = {"name": f"{wanted} kills of the draft", "kills": deaths, "answers": answers, "altered": altered}
    ok = altered == 0 and (leaked or 0) <= _LEAK_BYTES
    return row | {"leaked_mib": None if leaked is None else leaked / 2**20, "ok": ok}


def _free() -> list[int] | None:
    """Return the free memory of every GPU; None if it is unknown."""
    present = gpus.present()
    return None if present is None else [gpu.free for gpu in present]


def _wait_for_draft(client: Client, prompt: Prompt, job: Job) -> None:
    """Wait until a draft has loaded again and drafts, but not for ever."""
    deadline = time.monotonic() + min(_PATIENCE_S, max(0.0, job.left()))
    asked = SamplingParams(max_tokens=16, ignore_eos=True, speculation=Speculation("ssd", 4, (3,), "jit"))
    while time.monotonic() < deadline and not client.generate([prompt], asked)[0].metrics.drafted_tokens:
        time.sleep(0.1)
