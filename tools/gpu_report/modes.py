"""Measures modes at the cost of large models: random weights with synthetic acceptance, or an inflated pair."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from ssd.bench import figures
from ssd.bench.datasets import random_ids
from ssd.bench.runs import throughput
from ssd.bench.settings import Protocol, Setting
from ssd.client import Prompt
from ssd.config.emulation import Agreement
from ssd.config.params import Speculation
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.llm import running
from ssd.models.checkpoint import inspect
from tools.gpu_report.forward import TINY, read_once
from tools.gpu_report.job import Job, Row, config_folder
from tools.inflate.sizes import LIKE, Like, Sizes

LOOKAHEAD, FAN_OUT = 5, 3
STATED = Agreement(0.8, 0.85, LOOKAHEAD, FAN_OUT)  # between the paper's Llama pair at T = 0 and at T = 1
_SHOWN = ("tok_s", "over_ar", "over_sd", "acceptance_length", "hit_rate", "verify_ms", "tree_step_ms", "wait_ms")
_SHOWN += ("overhead_ms",)
_SMALL = Sizes(1024, 4, 16, 8, 64, 4096)
# One engine each must fit into what is left: seconds for starting it, and for a setting of one batch size.
_START_S, _CASE_S = 25.0, 6.0


class _Case(NamedTuple):
    name: str
    options: EngineOptions
    synthetic: Agreement | None


def rows(job: Job) -> Iterator[Row]:
    """Yield ar, sd and ssd by turns, for every pair, draft device, temperature and batch that there is time for."""
    batches, tokens = ((2,), 16) if job.tiny else ((1, 4, 16), 64)
    with tempfile.TemporaryDirectory() as folder:
        for case in _cases(job, Path(folder), max(batches)):
            if job.left() < _START_S and not job.tiny:
                yield {"name": case.name, "not_run": "no time left"}
                continue
            yield from _compared(job, case, batches, tokens)


def _cases(job: Job, folder: Path, most: int) -> Iterator[_Case]:
    pairs = [("llama-8b", LIKE["llama-8b"], size) for size in (_SMALL, LIKE["qwen3-0.6b"].sizes)]
    pairs += [("qwen3-32b", LIKE["qwen3-32b"], LIKE["qwen3-0.6b"].sizes)]
    if job.tiny:
        pairs = [("tiny", TINY, replace(TINY.sizes, num_hidden_layers=1))]
    common = {"device": job.device, "max_num_seqs": most, "max_model_len": 1024, "num_speculative_tokens": LOOKAHEAD}
    common |= {"dtype": "bfloat16", "fan_out": (FAN_OUT,), "mode": "ssd"}
    for device in job.draft_devices:
        if not job.tiny:
            name = f"{Path(job.target).name}, draft {Path(job.draft).name} on {device}"
            real = EngineOptions(target=job.target, draft=(job.draft,), draft_device=device, **common)
            yield _Case(name, real, None)
    for number, (name, like, sizes) in enumerate(pairs):
        target = config_folder(folder, f"target-{number}", like.config(4096))
        draft = config_folder(folder, f"draft-{number}", Like(like.model_type, like.vocab_size, sizes).config(4096))
        small, large = (read_once(inspect(Path(directory), weights=False)) for directory in (draft, target))
        for device in job.draft_devices:
            options = EngineOptions(target=target, draft=(draft,), draft_device=device, load_format="dummy", **common)
            yield _Case(f"{name}, draft of {small / large:.0%} on {device}", options, STATED)


def _compared(job: Job, case: _Case, batches: tuple[int, ...], tokens: int) -> Iterator[Row]:
    config = msgspec.structs.replace(resolve(case.options), synthetic=case.synthetic)
    fixed = Speculation("ssd", LOOKAHEAD, (FAN_OUT,))
    settings = [Setting("ar", Speculation("ar"))]
    settings += [Setting(mode, msgspec.structs.replace(fixed, mode=mode)) for mode in ("sd", "ssd")]
    with running(config) as (_, client):
        for batch in batches:
            prompts: list[Prompt] = list(random_ids(batch, 32, config.vocab_size, seed=batch))
            if case.synthetic is None:
                prompts = job.asked(batch)
            for temperature in (0.0, 1.0):
                if job.left() < _CASE_S and not job.tiny:
                    return
                protocol = Protocol(tokens, chat=False)
                runs = throughput(client, prompts, settings, temperature, protocol, batch, repeats=2)
                for row in figures.rows(settings, runs, temperature):
                    found = {key: row[key] for key in _SHOWN if row.get(key) is not None}
                    yield {"name": f"{case.name}, batch {batch}, T = {temperature:g}, {row['mode']}", **found}
