"""Runs tests/gpu; each test is a row, as it ends: a limit loses none that has run."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

from ssd import interpreter
from tools.gpu_report.job import Job, Row
from tools.processes import ROOT

DEVICE_VARIABLE = "SSD_TEST_DEVICE"
_ENDED = re.compile(r"(tests/gpu/\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)\b")
# Characters of pytest's last lines that are kept.
_MOST_SAID = 3000


def rows(job: Job) -> Iterator[Row]:
    command = interpreter.command("-m", "pytest", "-v", "-p", "no:cacheprovider", "--tb=line", "tests/gpu")
    environment = interpreter.environment() | {DEVICE_VARIABLE: job.device, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    tail: list[str] = []
    found = 0
    for line in process.stdout:
        tail = [*tail[-40:], line]
        if (ended := _ENDED.search(line)) is not None:
            found += 1
            yield {"name": ended[1].rpartition("::")[2], "state": ended[2].lower(), "ok": ended[2] == "PASSED"}
    if process.wait() and not found:
        raise RuntimeError("".join(tail)[-_MOST_SAID:])
    if process.returncode:
        yield {"name": "why", "said": "".join(tail)[-_MOST_SAID:], "ok": False}
