"""Run tests/gpu; each failure is a row as soon as the test ends: a limit loses none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence

from ssd.system import interpreter
from tools.gpu_report.job import Job, Row
from tools.processes import ROOT

DEVICE_VARIABLE = "SSD_TEST_DEVICE"
# A line of `pytest -v`, alone or with workers.
_ALONE = re.compile(r"^tests/gpu/(?P<test>\S+::.*?) (?P<state>PASSED|FAILED|ERROR|SKIPPED)\b")
_WORKER = re.compile(r"^\[gw\d+\].* (?P<state>PASSED|FAILED|ERROR|SKIPPED) tests/gpu/(?P<test>\S+::.*?)\s*$")
_SANITIZER = ("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", "--target-processes", "all")


def rows(
    job: Job, *, tests: Sequence[str] = ("",), processes: int = 1, sanitizer: bool = False, chosen: str = ""
) -> Iterator[Row]:
    """Yield a row for each test that fails, and one that counts. All output is in the log.

    `tests` are files in tests/gpu, `chosen` is an expression for pytest's -k. `sanitizer`: under NVIDIA's memory
    checker, which finds accesses out of bounds."""
    command = interpreter.command("-m", "pytest", "-v", "-p", "no:cacheprovider", "--tb=short", "--durations=15")
    command += [f"tests/gpu/{name}" for name in tests]
    if processes > 1:
        command += ["-n", str(min(processes, len(os.sched_getaffinity(0))))]
    if chosen:
        command += ["-k", chosen]
    environment = interpreter.environment() | {DEVICE_VARIABLE: job.device, "PYTHONUNBUFFERED": "1"}
    if sanitizer:
        command = [*_SANITIZER, *command]
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # each tensor has bounds of its own
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    found: list[bool] = []
    for line in process.stdout:
        sys.stdout.write(line)
        if (ended := _ALONE.match(line) or _WORKER.match(line)) is not None:
            found.append(ended["state"] == "PASSED")
            if not found[-1]:
                yield {"name": ended["test"], "state": ended["state"].lower(), "ok": False}
        if "ERROR SUMMARY" in line:
            yield {"name": "compute-sanitizer", "said": line.strip("= \n"), "ok": " 0 errors" in line}
    code = process.wait()
    yield {"name": "passed", "count": sum(found), "of": len(found), "ok": code == 0 and all(found) and bool(found)}
