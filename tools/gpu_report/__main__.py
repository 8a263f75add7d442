"""Measure this engine on a GPU with one command that ends in time (docs/gpu.md).

    python -m tools.gpu_report --target /tmp/target --draft /tmp/draft --dataset humaneval --out /tmp/report

Runs tests/gpu, measures verification against the copy bandwidth, audits a pair, compares the ids of all modes, kills
drafts, and measures the modes. Every part is a process with a time limit; it also gets the time that earlier parts
left. report.json and report.md are written after each part, with what a stopped part had found. Exit status 1:
something was wrong, not merely slow."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import click
import msgspec

from ssd.bench import datasets
from ssd.bench.environment import environment
from tools import processes
from tools.gpu_report.job import Job, Row
from tools.gpu_report.writing import Part, write

_END_S = 5.0  # what a part gets beyond its deadline, to end by itself and then by force


class _Planned(NamedTuple):
    """A module of `tools.gpu_report`, and its share of the time."""

    module: str
    share: float
    about: str


PLAN = (
    _Planned("tests", 1.0, "tests/gpu."),
    _Planned("forward", 1.5, "Verification of random weights over the bytes that it must read; aim: `of_copy` 0.8."),
    _Planned(
        "audit", 1.0, "Verifications against single steps, teacher-forced; `ok`: best tokens differ in near-ties alone."
    ),
    _Planned("ids", 2.5, "Ids equal to those of `ar` bit for bit, also while drafts are killed."),
    _Planned(
        "modes", 3.5, "Tokens a second of the modes, by turns; pairs named by sizes are random with synthetic hits."
    ),
    _Planned("assisted", 0.8, "transformers with the same pair."),
)


@click.command(help=__doc__)
@click.option("--device", default="cuda", show_default=True)
@click.option("--draft-device", "draft_devices", multiple=True, help="Again for another. Default: --device, and cpu.")
@click.option("--target", default="smollm2", show_default=True, help="With --draft: a pair with real texts.")
@click.option("--draft", default="smollm2-draft", show_default=True)
@click.option("--dataset", default=datasets.RANDOM, show_default=True, help=f"Prompts: {datasets.KNOWN}.")
@click.option("--only", type=click.Choice([part.module for part in PLAN]), multiple=True, help="These parts alone.")
@click.option("--seconds", type=click.FloatRange(min=10), default=570.0, show_default=True, help="For everything.")
@click.option("--tiny", is_flag=True, help="Sizes for trying this command: what it finds means nothing.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True)
@click.option("--part", hidden=True)
@click.option("--job", type=click.Path(path_type=Path), hidden=True)
def main(
    device: str,
    draft_devices: tuple[str, ...],
    target: str,
    draft: str,
    dataset: str,
    only: tuple[str, ...],
    seconds: float,
    tiny: bool,
    out: Path,
    part: str | None,
    job: Path | None,
) -> None:
    if part is not None and job is not None:
        _run_part(part, msgspec.json.decode(job.read_bytes(), type=Job), out)
        return
    end = time.monotonic() + seconds
    out.mkdir(parents=True, exist_ok=True)
    devices = draft_devices or tuple(dict.fromkeys((device, "cpu")))
    with tempfile.TemporaryDirectory() as folder:
        if tiny:
            target, draft = _tiny_pair(Path(folder))
        given = Job(device, devices, tiny, target, draft, dataset, end)
        parts = _report(given, only, Path(folder), out)
    for wrong in (each for part in parts for each in part.wrong):
        click.echo(f"wrong: {wrong}", err=True)
    if any(part.wrong for part in parts):
        raise SystemExit(1)


def _tiny_pair(folder: Path) -> tuple[str, str]:
    from tools.soak import tiny

    target, draft = tiny.pair(folder)
    return str(target), str(draft)


def _report(job: Job, only: tuple[str, ...], folder: Path, out: Path) -> list[Part]:
    plan = [part for part in PLAN if not only or part.module in only]
    parts = [Part(part.module, part.about) for part in plan]
    names = ("device", "draft_devices", "tiny", "target", "draft", "dataset")
    facts = {**environment(), **{name: getattr(job, name) for name in names}}
    write(out, facts, parts)
    for index, (planned, part) in enumerate(zip(plan, parts, strict=True)):
        share = planned.share / sum(later.share for later in plan[index:])
        began = time.monotonic()
        limit = (job.deadline - began) * share - _END_S
        if limit > 0:
            part.state, part.rows = _started(planned.module, job, began + limit, folder)
        part.seconds = time.monotonic() - began
        write(out, facts, parts)
        click.echo(f"{part.name}: {part.state}, {part.seconds:.0f} s")
    return parts


def _started(module: str, job: Job, deadline: float, folder: Path) -> tuple[str, list[Row]]:
    """Run a part to its end or its limit. Returns its state and what it found."""
    told, found, errors = (folder / f"{module}.{kind}" for kind in ("job", "rows", "err"))
    told.write_bytes(msgspec.json.encode(msgspec.structs.replace(job, deadline=deadline)))
    started = processes.command("tools.gpu_report", "--part", module, "--job", str(told), "--out", str(found))
    quiet = subprocess.DEVNULL
    with errors.open("w") as file:
        process = subprocess.Popen(
            started, stdin=quiet, stdout=file, stderr=file, env=processes.environment(), start_new_session=True
        )
    try:
        process.wait(max(0.0, deadline - time.monotonic()) + _END_S / 2)
        said = errors.read_text(errors="replace").strip().splitlines()
        state = "done" if process.returncode == 0 else f"failed: {(said or ['no word'])[-1][:500]}"
    except subprocess.TimeoutExpired:
        state = "stopped at its limit"
    finally:
        _end(process)
    rows = [json.loads(line) for line in found.read_text().splitlines()] if found.exists() else []
    return state, list({row["name"]: row for row in rows}.values())


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part and what it has started: an engine's processes end with the one that started them."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(_END_S / 5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _run_part(module: str, job: Job, found: Path) -> None:
    with found.open("w") as file:
        for row in importlib.import_module(f"tools.gpu_report.{module}").rows(job):
            file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
