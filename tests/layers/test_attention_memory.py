"""The memory of attention: it must not grow with the sequence."""

from __future__ import annotations

import subprocess

import pytest

from ssd import interpreter

MIB = 2**20

_PEAK = r"""
import re, sys
from pathlib import Path
import torch
from ssd.layers.attention import attend, attend_part

def told(name):
    return 1024 * int(re.search(name + r":\s+([0-9]+)", Path("/proc/self/status").read_text())[1])

torch.set_num_threads(1)
with torch.inference_mode():
    keys, values, q = torch.ones(8192, 3, 64), torch.ones(8192, 3, 64), torch.ones(256, 9, 64)
    attend(q[:1], keys, values, 0.125)  # libraries
    before = told("VmRSS")
    for length in range(256, 8192 + 1, 1984):
        {"attend": attend, "attend_part": lambda *of: attend_part(*of, None)}[sys.argv[1]](
            q, keys[:length], values[:length], 0.125
        )
    print(told("VmHWM") - before)
"""


@pytest.mark.parametrize("function", ["attend", "attend_part"])
def test_a_prompt_chunk_over_a_long_text_takes_no_more_than_a_few_products(function: str) -> None:
    """All scores of 256 queries with 9 heads over 8,192 keys at once would take 72 MiB, and softmax as much again."""
    done = subprocess.run(
        interpreter.command("-c", _PEAK, function),
        env=interpreter.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 64 * MIB, f"{int(done.stdout) / MIB:.0f} MiB"
