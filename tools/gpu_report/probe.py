"""Note what the machine has, and check what the engine assumes of CUDA there."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch
import triton
import triton.language as tl

from ssd.config import gpus
from ssd.ipc.board import BoardReader, size_bytes
from ssd.ipc.device_board import DeviceBoard, page_locked
from ssd.ipc.process import memory_file
from tools.gpu_report.job import Job, Row
from tools.gpu_report.timing import captured, copy_bandwidth, device_seconds, wait

_PACKAGES = ("zmq", "msgspec", "gguf", "flash_attn", "llguidance", "jsonschema", "xdist", "pytest_timeout", "click")
_PROGRAMS = ("nvidia-smi", "nvidia-cuda-mps-control", "compute-sanitizer", "ncu", "nvcc", "gcc")
_LAUNCHES = 1000


@triton.jit
def _touch_kernel(x_ptr, WAITS: tl.constexpr):  # type: ignore[no-untyped-def]
    if WAITS:
        tl.extra.cuda.gdc_wait()
    tl.store(x_ptr, tl.load(x_ptr) + 1)
    if WAITS:
        tl.extra.cuda.gdc_launch_dependents()


def rows(job: Job) -> Iterator[Row]:
    """Yield one row for each probe; a probe that raises is a row that says why."""
    yield {"name": "packages", "missing": ", ".join(name for name in _PACKAGES if find_spec(name) is None)}
    yield {"name": "programs", "missing": ", ".join(name for name in _PROGRAMS if shutil.which(name) is None)}
    shared, locked = shutil.disk_usage("/dev/shm").total, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield {"name": "limits", "shm_gib": shared / 2**30, "memlock": locked, "cores": len(os.sched_getaffinity(0))}
    yield {"name": "gpus", "said": str(gpus.present())}
    for name, probe in _PROBES.items():
        began = time.perf_counter()
        try:
            found = probe(job)
        except Exception as error:
            found = {
                "failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                "ok": False,
            }
        yield {"name": name, **found, "seconds": time.perf_counter() - began}


def _copy(job: Job) -> Row:
    size = 2**24 if job.tiny else 2**32
    return {"gb_s": copy_bandwidth(torch.device(job.device), size, 20) / 1e9, "bytes": size}


def _first_launch(job: Job) -> Row:
    """Time a kernel of the engine for the first time in this process: with a carried cache below 50 ms."""
    from ssd.kernels.gpu import fuses
    from ssd.speculation.sampling import drawn

    logits = torch.randn(8, 4096, device=job.device, dtype=torch.bfloat16)
    wait(torch.device(job.device))
    began = time.perf_counter()
    drawn(logits)
    wait(torch.device(job.device))
    return {"ms": 1e3 * (time.perf_counter() - began), "fuses": fuses(torch.device(job.device))}


def _graph(dependent: bool) -> Callable[[Job], Row]:
    def probe(job: Job) -> Row:
        """Time a launch of a kernel that does next to nothing, in a graph where each depends on the one before."""
        x = torch.zeros(1, device=job.device)
        more = {"launch_pdl": True} if dependent else {}

        def launch() -> None:
            for _ in range(_LAUNCHES):
                _touch_kernel[(1,)](x, WAITS=dependent, num_warps=1, **more)

        graph = captured(launch)
        x.zero_()
        seconds = device_seconds(graph, 10)
        return {"us_a_launch": 1e6 * seconds / _LAUNCHES, "ok": int(x) % _LAUNCHES == 0 and int(x) > 0}

    return probe


def _page_lock(job: Job) -> Row:
    """Page-lock a board as the target does, and read it on the device."""
    reader = BoardReader(memory_file("probe", size_bytes(2)), 2, 1000)
    locked = page_locked(reader)
    board = DeviceBoard(reader, torch.device(job.device))
    board.fetch(2)
    wait(torch.device(job.device))
    same = bool((board.words[0].cpu() == torch.from_numpy(reader.slots)).all())
    return {"locked": locked, "ok": locked and same}


def _mps(job: Job) -> Row:
    found = shutil.which("nvidia-cuda-mps-control")
    version = subprocess.run(["nvidia-cuda-mps-control", "-v"], capture_output=True, text=True) if found else None
    return {"found": found, "said": version.stdout.strip() if version else None}


def _graph_memory(job: Job) -> Row:
    """Measure what a CUDA context and its libraries take, which `ssd.launch.memory` counts as a GiB."""
    free, total = torch.cuda.mem_get_info()
    taken = (total - free) / 2**20
    return {"mib": taken, "of_torch_mib": torch.cuda.memory_reserved() / 2**20, "python": sys.version.split()[0]}


_PROBES: dict[str, Callable[[Job], Row]] = {
    "mps": _mps,
    "copy": _copy,
    "first Triton kernel": _first_launch,
    "launch in a graph": _graph(False),
    "launch in a graph, dependent": _graph(True),
    "page-locked board": _page_lock,
    "memory of this process": _graph_memory,
}
