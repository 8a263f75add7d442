"""`tools.product_speeds`: every kind of weights and inputs is timed; without kernels the cause is named."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from ssd.kernels import cpu
from tools import product_speeds


@pytest.mark.skipif(not cpu.multiply_floats(torch.empty(1, 1)), reason="no kernels for products")
def test_every_kind_has_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_speeds, "_BYTES", 2**23)
    monkeypatch.setattr(product_speeds, "_REPEATS", 1)
    shown = CliRunner().invoke(product_speeds.main, ["--threads", "1"])
    assert shown.exit_code == 0, shown.output
    lines = [line.split("│")[1:-1] for line in shown.output.splitlines() if line.startswith("│")]
    assert len({(line[0], line[1]) for line in lines}) == len(lines) == 8
    assert all(float(cell) > 0 for line in lines for cell in line[2:])


def test_a_machine_without_kernels_is_told_so() -> None:
    command = [sys.executable, "-m", "tools.product_speeds"]
    shown = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"SSD_KERNELS": "0"})
    assert shown.returncode == 1 and "no kernels of ours" in shown.stderr
