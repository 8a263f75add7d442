"""Runs tests/gpu; each test is a row."""

from __future__ import annotations

import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from ssd import interpreter
from tools.gpu_report.job import Job, Row
from tools.processes import ROOT

DEVICE_VARIABLE = "SSD_TEST_DEVICE"


def rows(job: Job) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.xml"
        command = interpreter.command("-m", "pytest", "-q", "tests/gpu", f"--junitxml={found}")
        environment = interpreter.environment() | {DEVICE_VARIABLE: job.device}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if not found.is_file():
            raise RuntimeError((done.stdout + done.stderr)[-2000:])
        for case in ElementTree.parse(found).iter("testcase"):
            troubles = [*case.iter("failure"), *case.iter("error")]
            said = " ".join(str(each.get("message")) for each in troubles)[:300]
            yield {"name": case.get("name"), "seconds": float(case.get("time", 0)), "said": said, "ok": not troubles}
