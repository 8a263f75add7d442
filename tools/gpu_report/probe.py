"""Note what the machine has, and check what the engine assumes of CUDA there."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

from ssd.config import gpus
from ssd.ipc.board import BoardReader, size_bytes
from ssd.ipc.device_board import DeviceBoard, page_locked
from ssd.ipc.process import memory_file
from ssd.launch import mps
from ssd.system import interpreter
from tools.gpu_report.green import captured_on, green_streams
from tools.gpu_report.job import Job, Row
from tools.gpu_report.timing import copy_bandwidth, wait

_PACKAGES = ("zmq", "msgspec", "gguf", "flash_attn", "llguidance", "jsonschema", "xdist", "pytest_timeout", "click")
_PROGRAMS = ("nvidia-smi", "nvidia-cuda-mps-control", "compute-sanitizer", "ncu", "nvcc", "gcc")
_HEADERS = ("cuda_fp16.h", "cuda_fp8.h", "cuda/std/type_traits")
_WANTED = ("avx512f", "avx512_vnni", "amx_tile", "amx_int8", "amx_bf16")


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


def _page_lock(job: Job) -> Row:
    """Page-lock a board as the target does, and read it on the device."""
    reader = BoardReader(memory_file("probe", size_bytes(2)), 2, 1000)
    locked = page_locked(reader)
    board = DeviceBoard(reader, torch.device(job.device))
    board.fetch(2)
    wait(torch.device(job.device))
    same = bool((board.words[0].cpu() == torch.from_numpy(reader.slots)).all())
    return {"locked": locked, "ok": locked and same}


def _share(job: Job) -> Row:
    """Ask how many multiprocessors a client of MPS with a share of 20 % sees: kernels are compiled for that number."""
    said = "import torch; print(torch.cuda.get_device_properties(0).multi_processor_count)"
    with mps.service() as where:
        environment = interpreter.environment() | where | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "20"}
        command = interpreter.command("-c", said)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    whole = torch.cuda.get_device_properties(0).multi_processor_count
    last = (done.stdout + done.stderr).strip().splitlines()[-1:]
    return {"processors": whole, "with 20 %": last[0] if last else "no word", "ok": done.returncode == 0}


def _green(job: Job) -> Row:
    """Capture on a stream of a green context, and replay: a kernel of torch and one of Triton."""
    from ssd.speculation.sampling import drawn

    (stream, _, count), x = green_streams(16), torch.zeros(1, device=job.device)
    logits = torch.randn(8, 4096, device=job.device)
    replay = captured_on(lambda: (x.add_(1), drawn(logits)), stream)
    x.zero_()
    with torch.cuda.stream(stream):
        replay()
    stream.synchronize()
    return {"processors": count, "ok": int(x) == 1}


def _nvrtc(job: Job) -> Row:
    """Look for what compiles CUDA at run time: torch's NVRTC, and headers in the packages beside it."""
    ctypes.CDLL(f"libnvrtc.so.{(torch.version.cuda or '').partition('.')[0]}")
    near = [Path(folder) for folder in (find_spec("nvidia") or find_spec("torch")).submodule_search_locations or ()]  # type: ignore[union-attr]
    headers = {name: any(True for folder in near for _ in folder.rglob(name)) for name in _HEADERS}
    return {**headers, "cuda.bindings": find_spec("cuda") is not None and find_spec("cuda.bindings") is not None}


def _host(job: Job) -> Row:
    """Note what of the host a draft on it would use: AMX, and the rate at which all cores but one copy."""
    flags = set(re.findall(r"\w+", next(re.finditer(r"^flags.*", Path("/proc/cpuinfo").read_text(), re.M))[0]))
    cores = max(1, len(os.sched_getaffinity(0)) - 1)
    torch.set_num_threads(cores)
    rate = copy_bandwidth(torch.device("cpu"), 2**24 if job.tiny else 2**30, 5)
    has = " ".join(name for name in _WANTED if name in flags)
    return {"has": has, "copying cores": cores, "gb_s": rate / 1e9}


_PROBES: dict[str, Callable[[Job], Row]] = {
    "copy": _copy,
    "first Triton kernel": _first_launch,
    "page-locked board": _page_lock,
    "a share under MPS": _share,
    "green context": _green,
    "NVRTC": _nvrtc,
    "host": _host,
}
