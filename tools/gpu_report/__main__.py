"""Measure this engine on a GPU with one command that ends in time (tools/gpu_report/README.md).

    python -m tools.gpu_report --target /tmp/target --draft /tmp/draft --dataset humaneval --out /tmp/report
    python -m tools.gpu_report --call l1 --out /tmp/report

Each step is a process with a limit of its own, and no step depends on another. Without a pair, random weights take its
place. `--out` gets rows.jsonl, where each row is on the disk as soon as it is found; log.txt, with all that the steps
print; and report.md, written anew after each step. Exit status 1: something was wrong, not merely slow."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from ssd.plugins.bench import datasets
from ssd.plugins.bench.environment import environment
from tools import processes
from tools.gpu_report.job import Job, made_pair
from tools.gpu_report.programmes import CALLS, EVERYTHING, SECONDS, Step
from tools.gpu_report.writing import ROWS, Log, Part, parts_of, write

_END_S = 5.0  # what a step gets beyond its limit, to end by itself and then by force


class _Told(msgspec.Struct, frozen=True):
    """The message to the process of a step."""

    step: Step
    job: Job


@click.command(help=__doc__)
@click.option("--call", "calls", type=click.Choice(list(CALLS)), multiple=True, help="Of a programme: its steps.")
@click.option("--only", multiple=True, help="These steps alone, in this order; without --call those of all calls.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--draft-device", "draft_devices", multiple=True, help="Again for another. Default: --device, and cpu.")
@click.option("--target", help="With --draft: a pair with real texts. Default: a made one.")
@click.option("--draft")
@click.option("--dataset", default=datasets.RANDOM, show_default=True, help=f"Prompts: {datasets.KNOWN}.")
@click.option(
    "--seconds", type=click.FloatRange(min=10), help="For everything. Default: a call's, or the sum of limits."
)
@click.option("--slower", type=click.FloatRange(min=1), default=1.0, help="Multiplies the limits: a slower machine.")
@click.option("--tiny", is_flag=True, help="Sizes for trying this command: what it finds means nothing.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True)
@click.option("--told", type=click.Path(path_type=Path), hidden=True)
def main(
    calls: tuple[str, ...],
    only: tuple[str, ...],
    device: str,
    draft_devices: tuple[str, ...],
    target: str | None,
    draft: str | None,
    dataset: str,
    seconds: float | None,
    slower: float,
    tiny: bool,
    out: Path,
    told: Path | None,
) -> None:
    if told is not None:
        _run(msgspec.json.decode(told.read_bytes(), type=_Told))
        return
    if (target is None) != (draft is None):
        raise click.UsageError("--target and --draft belong together")
    plan = tuple(step for call in calls for step in CALLS[call]) or EVERYTHING
    known = {step.title: step for step in ([] if calls else [step for each in CALLS.values() for step in each])}
    known |= {step.title: step for step in plan}
    unknown = set(only) - known.keys()
    if unknown:
        raise click.UsageError(f"no step {min(unknown)!r}; there are {', '.join(known)}")
    chosen = [known[title] for title in only] or plan
    plan = tuple(msgspec.structs.replace(step, seconds=slower * step.seconds) for step in chosen)
    if seconds is None:
        limits = sum(step.seconds + _END_S for step in plan)
        seconds = min(limits, slower * sum(SECONDS.get(call, limits) for call in calls) or limits)
    end = time.monotonic() + seconds
    out.mkdir(parents=True, exist_ok=True)
    devices = draft_devices or tuple(dict.fromkeys((device, "cpu")))
    with tempfile.TemporaryDirectory() as folder:
        made = target is None or draft is None
        if target is None or draft is None:
            target, draft = made_pair(Path(folder), tiny)
        job = Job(device, devices, tiny, target, draft, made, dataset, str(out), end)
        parts = _report(job, plan, Path(folder), out)
    for wrong in (each for part in parts for each in part.wrong):
        click.echo(f"wrong: {wrong}", err=True)
    if any(part.wrong for part in parts):
        raise SystemExit(1)


def _report(job: Job, plan: Sequence[Step], folder: Path, out: Path) -> list[Part]:
    log = Log(out / ROWS)
    facts = {**environment(), "device": job.device, "target": job.target, "draft": job.draft, "tiny": job.tiny}
    log.add(step="", **facts)
    for step in plan:
        began = time.monotonic()
        limit = min(step.seconds, job.deadline - began - _END_S)
        told = msgspec.structs.replace(job, deadline=began + limit, step=step.title)
        state = _started(step, told, folder) if limit > 0 else "no time"
        seconds = time.monotonic() - began
        log.add(step=step.title, state=state, seconds=seconds)
        click.echo(f"{step.title}: {state}, {seconds:.0f} s")
        write(out, facts, parts_of(out, plan))
    return parts_of(out, plan)


def _started(step: Step, job: Job, folder: Path) -> str:
    """Run a step to its end or its limit. Returns its state."""
    told, log = folder / "told", job.log
    told.write_bytes(msgspec.json.encode(_Told(step, job)))
    started = processes.command("tools.gpu_report", "--told", str(told), "--out", job.out)
    with log.open("a") as file:
        file.write(f"\n==== {step.title}\n")
        file.flush()
        begin = file.tell()
        process = subprocess.Popen(
            started,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=processes.environment() | {"PYTHONUNBUFFERED": "1"} | step.environment,
            start_new_session=True,
        )
    try:
        process.wait(max(0.0, job.left()) + _END_S / 2)
        said = log.read_bytes()[begin:].decode(errors="replace").strip().splitlines()
        return "done" if process.returncode == 0 else f"failed: {(said or ['no word'])[-1][:500]}"
    except subprocess.TimeoutExpired:
        return "stopped at its limit"
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a step and what it has started: an engine's processes end with the one that started them."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(_END_S / 5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _run(told: _Told) -> None:
    part: Any = importlib.import_module(f"tools.gpu_report.{told.step.part}")
    log = Log(Path(told.job.out) / ROWS)
    for row in part.rows(told.job, **told.step.options):
        log.add(step=told.step.title, **row)


if __name__ == "__main__":
    main()
