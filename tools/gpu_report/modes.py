"""Measure modes at the cost of large models: random weights with synthetic acceptance, or an inflated pair."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ssd.bench import figures
from ssd.bench.datasets import random_ids
from ssd.bench.runs import throughput
from ssd.bench.settings import Protocol, Setting, Sweep
from ssd.client import Prompt
from ssd.config.emulation import Agreement
from ssd.config.params import Mode, Speculation
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.llm import running
from ssd.models.checkpoint import inspect
from tools.gpu_report.forward import read_once
from tools.gpu_report.job import TINY, Job, Row, config_folder
from tools.inflate.sizes import LIKE, Like, Sizes

_LOOKAHEAD, _FAN_OUT = 5, 3
STATED = Agreement(0.8, 0.85, _LOOKAHEAD, _FAN_OUT)  # between the paper's Llama pair at T = 0 and at T = 1
_SHOWN = ("tok_s", "over_ar", "over_sd", "acceptance_length", "hit_rate", "verify_ms", "tree_step_ms", "wait_ms")
_SHOWN += ("overhead_ms",)
_SMALL = Sizes(1024, 4, 16, 8, 64, 4096)
PAIRS = {
    "llama-8b small": (LIKE["llama-8b"], _SMALL),
    "llama-8b 0.6b": (LIKE["llama-8b"], LIKE["qwen3-0.6b"].sizes),
    "qwen3-32b 0.6b": (LIKE["qwen3-32b"], LIKE["qwen3-0.6b"].sizes),
}
"""Targets, and the sizes of their drafts."""
# One engine each must fit into what is left: seconds for starting it, and for a setting of one batch size.
_START_S, _CASE_S = 25.0, 6.0


class Case(NamedTuple):
    name: str
    options: EngineOptions
    synthetic: Agreement | None


class _Extent(NamedTuple):
    batches: Sequence[int]
    temperatures: Sequence[float]
    modes: Sequence[Mode]
    fan_outs: Sequence[int]
    lookaheads: Sequence[int]
    tokens: int


def rows(
    job: Job,
    *,
    pairs: Sequence[str] = ("llama-8b small", "llama-8b 0.6b", "qwen3-32b 0.6b"),
    draft_devices: Sequence[str] = (),
    batches: Sequence[int] = (1, 4, 16),
    temperatures: Sequence[float] = (0.0, 1.0),
    modes: Sequence[Mode] = ("ar", "sd", "ssd"),
    lookaheads: Sequence[int] = (_LOOKAHEAD,),
    fan_outs: Sequence[int] = (_FAN_OUT,),
    options: Mapping[str, Any] | None = None,
) -> Iterator[Row]:
    """Yield the modes by turns, for every pair, draft device, temperature and batch that there is time for.

    `pairs` are names of `PAIRS`, with random weights and synthetic acceptance; the job's pair comes too, unless it is a
    made one. `draft_devices`: by default the job's. `options` are further ones of the engine. A pair that fails
    is a row."""
    extent = _Extent(batches, temperatures, modes, fan_outs, lookaheads, 64)
    if job.tiny:
        extent = extent._replace(batches=(2,), tokens=16)
    with tempfile.TemporaryDirectory() as folder:
        fixed = {"num_speculative_tokens": max(lookaheads), "fan_out": (max(fan_outs),), **(options or {})}
        devices = draft_devices or job.draft_devices
        for case in cases(job, Path(folder), max(extent.batches), pairs, devices, fixed, given=not job.made):
            if job.left() < _START_S and not job.tiny:
                yield {"name": case.name, "not_run": "no time left"}
                continue
            try:
                yield from _compared(job, case, extent)
            except Exception as error:
                traceback.print_exc()
                yield {"name": case.name, "failed": f"{type(error).__name__}: {error}", "ok": False}


def cases(
    job: Job,
    folder: Path,
    most: int,
    names: Sequence[str],
    draft_devices: Sequence[str],
    options: Mapping[str, Any],
    given: bool = False,
) -> Iterator[Case]:
    """Yield an engine for up to `most` sequences for each of the pairs (`PAIRS`) and draft devices."""
    pairs = {name: PAIRS[name] for name in names}
    if job.tiny:
        pairs = {"tiny": (TINY, replace(TINY.sizes, num_hidden_layers=1))}
    common = {"device": job.device, "max_num_seqs": most, "max_model_len": 1024, "mode": "ssd", "dtype": "bfloat16"}
    common |= {"num_speculative_tokens": _LOOKAHEAD, "fan_out": (_FAN_OUT,), **options}
    for number, (name, (like, sizes)) in enumerate(pairs.items()):
        target = config_folder(folder, f"target-{number}", like.config(4096))
        draft = config_folder(folder, f"draft-{number}", Like(like.model_type, like.vocab_size, sizes).config(4096))
        small, large = (read_once(inspect(Path(directory), weights=False)) for directory in (draft, target))
        for device in draft_devices:
            chosen = {"target": target, "draft": (draft,), "draft_device": device, "load_format": "dummy"}
            yield Case(f"{name} ({small / large:.0%}) on {device}", EngineOptions(**(common | chosen)), STATED)
    if given:
        for device in draft_devices:
            chosen = {"target": job.target, "draft": (job.draft,), "draft_device": device}
            name = f"{Path(job.target).name}, draft {Path(job.draft).name} on {device}"
            yield Case(name, EngineOptions(**(common | chosen)), None)


def _settings(extent: _Extent) -> list[Setting]:
    sweep = Sweep(tuple(extent.modes), tuple(extent.lookaheads), tuple((fan_out,) for fan_out in extent.fan_outs))
    return sweep.settings(Speculation("ssd", 4, (3,), "jit"))


def _compared(job: Job, case: Case, extent: _Extent) -> Iterator[Row]:
    config = msgspec.structs.replace(resolve(case.options), synthetic=case.synthetic)
    settings = _settings(extent)
    began = time.monotonic()
    with running(config) as (_, client):
        yield {"name": f"{case.name}, start", "seconds": time.monotonic() - began}
        for batch in extent.batches:
            prompts: list[Prompt] = list(random_ids(batch, 32, config.vocab_size, seed=batch))
            if case.synthetic is None:
                prompts = job.asked(batch)
            for temperature in extent.temperatures:
                if job.left() < _CASE_S and not job.tiny:
                    return
                protocol = Protocol(extent.tokens, chat=False)
                runs = throughput(client, prompts, settings, temperature, protocol, batch, repeats=2)
                for row in figures.rows(settings, runs, temperature):
                    found = {key: row[key] for key in _SHOWN if row.get(key) is not None}
                    yield {"name": f"{case.name}, batch {batch}, T = {temperature:g}, {row['mode']}", **found}
