"""Rehearse the calls of the GPU report on a stand-in for CUDA, and pack what a device needs.

\b
    python -m tools.gpu_rehearsal                  # all calls: make gpu-rehearsal
    python -m tools.gpu_rehearsal --call l1 --only probe

tools/gpu_report/README.md has its chapter. Each call runs in a bare checkout without a network, on the device's
versions of torch and Triton (`standin.py` says what is real there). Exit status 1: a step did not end by itself, the
stand-in's log has an error or a warning, a captured graph has more launches than tests/capture allows, or a kernel more
stack or shared memory than `resources.py` allows. Numbers are wrong on a stand-in, so rows that compare them do not
count.

`--carry` gets Triton's cache (kernels and launchers, compiled once here instead of on the device), the wheels that the
device lacks, and the site folder that lets the cache fit its Python:

\b
    mkdir -p /tmp/tc && tar xJf .carry/triton.txz -C /tmp/tc
    python3 -m pip install -q --no-index --no-deps --target /tmp/site .carry/*.whl
    export PYTHONPATH=/tmp/site:$PWD/.carry/site TRITON_CACHE_DIR=/tmp/tc PIN_TRITON=ssd
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import click

from ssd.system.files import cache_dir
from tools.gpu_rehearsal import launches, resources
from tools.gpu_rehearsal.standin import CARRIED, StandIn, bare_checkout, download_wheels
from tools.gpu_report.programmes import CALLS
from tools.gpu_report.writing import parts_of
from tools.processes import ROOT

_CACHE = Path("/tmp/tc")  # named so on the device too
_CARRIED_SUFFIXES = (".json", ".cubin", ".so")


@click.command(help=__doc__)
@click.option("--call", "calls", type=click.Choice(list(CALLS)), multiple=True, help="These calls. Default: all.")
@click.option("--only", multiple=True, help="These steps of the calls alone.")
@click.option("--slower", type=click.FloatRange(min=1), default=8.0, show_default=True, help="Multiplies all limits.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False, resolve_path=True), default=ROOT / "build/rehearsal"
)
@click.option("--carry", type=click.Path(path_type=Path, file_okay=False), default=ROOT / ".carry")
@click.option("--cache", type=click.Path(path_type=Path, file_okay=False), default=_CACHE, show_default=True)
def main(calls: tuple[str, ...], only: tuple[str, ...], slower: float, out: Path, carry: Path, cache: Path) -> None:
    began = time.monotonic()
    carry.mkdir(parents=True, exist_ok=True)
    download_wheels(carry)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    stand_in = StandIn(cache_dir() / "cuda-standin", cache, out / "stand-in.log")
    stand_in.make(carry)
    wrong = []
    with bare_checkout(ROOT) as checkout:
        for piece in sorted(carry.glob("piece*")):  # of programme 3's target, if they are there
            shutil.copytree(piece, checkout / ".carry" / piece.name)
        for call in calls or CALLS:
            wrong += _rehearse(stand_in, checkout, call, only, slower, out / call)
    wrong += _wrong_in(stand_in.log.read_text())
    lines, over = resources.table(cache)
    click.echo("\n".join(lines))
    _pack(cache, carry)
    click.echo("\n".join(f"wrong: {each}" for each in (*wrong, *over)))
    click.echo(f"{(time.monotonic() - began) / 60:.1f} minutes, {len(over)} variants over their ceilings")
    if wrong or over:
        raise SystemExit(1)


def _rehearse(
    stand_in: StandIn, checkout: Path, call: str, only: tuple[str, ...], slower: float, out: Path
) -> Iterator[str]:
    """Run a call to its end; yield what did not end as it should."""
    plan = [step for step in CALLS[call] if not only or step.title in only]
    if not plan:
        return
    command = ["python", "-m", "tools.gpu_report", "--call", call, "--slower", str(slower), "--out", str(out)]
    if call.startswith("3"):  # its steps last as long as they are given
        command.append("--tiny")
    command += [word for step in plan for word in ("--only", step.title)]
    click.echo(f"call {call}")
    stand_in.run(checkout, command, stderr=subprocess.DEVNULL, check=False)
    for part in parts_of(out, plan):
        if part.state != "done":
            yield f"call {call}, {part.name}: {part.state}"
        yield from (f"call {call}, {part.name}, {row['name']}: {row['failed']}" for row in part.rows if "failed" in row)


def _wrong_in(log: str) -> list[str]:
    """Print the graphs that were captured; return rules that were broken, and graphs over their ceilings."""
    found = launches.graphs(log)
    click.echo("\n".join(launches.counted(found)))
    over = launches.over(found)
    broken = [f"{line} ({times} times)" for line, times in launches.broken_rules(log).items()]
    return broken + [f"{graph}: at most {most} launches" for graph, most in sorted(over.items())]


def _pack(cache: Path, carry: Path) -> None:
    """Pack kernels and launchers of Triton's cache, and the site folder."""
    shutil.copytree(CARRIED, carry / "site", dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    files = sorted(path for path in cache.glob("*/*") if path.suffix in _CARRIED_SUFFIXES)
    packed = carry / "triton.txz"
    with tarfile.open(packed, "w:xz", preset=9) as archive:
        for path in files:
            archive.add(path, path.relative_to(cache))
    size = sum(path.stat().st_size for path in carry.rglob("*") if path.is_file())
    kernels = sum(path.suffix == ".cubin" for path in files)
    click.echo(f"{carry}: {size / 2**20:.1f} MiB, {kernels} kernels")


if __name__ == "__main__":
    main()
