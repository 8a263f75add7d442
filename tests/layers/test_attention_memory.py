"""The memory of attention: it must not grow with the sequence."""

from __future__ import annotations

import subprocess

import pytest

from ssd.system import interpreter

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
    run = {"attend": attend, "attend_part": lambda *of: attend_part(*of, None)}[sys.argv[1]]
    run(q[:1], keys, values, 0.125)  # libraries
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far
    before = told("VmRSS")
    for length in range(256, 8192 + 1, 1984):
        run(q, keys[:length], values[:length], 0.125)
    print(told("VmHWM") - before)
"""


@pytest.mark.parametrize("function", ["attend", "attend_part"])
def test_a_prompt_chunk_over_a_long_text_takes_no_more_than_a_few_products(function: str) -> None:
    """All scores of 256 queries with 9 heads over 8,192 keys at once would take 72 MiB, and softmax as much again."""
    done = subprocess.run(
        interpreter.command("-c", _PEAK, function),
        env=interpreter.environment() | {"MALLOC_MMAP_THRESHOLD_": "131072"},  # what is freed is given back at once
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 64 * MIB, f"{int(done.stdout) / MIB:.0f} MiB"


_LENGTHS = r"""
import re, sys
from pathlib import Path
import torch
from ssd.layers.attention import attend, attend_each, attend_own, attend_part
from ssd.layers.linear import Linear

def private():
    return 1024 * int(re.search(r"Private_Dirty: +([0-9]+)", Path("/proc/self/smaps_rollup").read_text())[1])

def run(count):
    keys = torch.ones(600 + count, 3, 64)
    each = torch.ones(1 + count, 40, 3, 64)
    attend(q, keys, keys, 0.125)
    attend_part(q, keys, keys, 0.125, None)
    attend_own(torch.ones(1 + count, 9, 64), each, each, 0.125, torch.zeros(1 + count, 1, 1, 40))
    attend_each(torch.ones(1 + count, 9, 64), each, each, 0.125, torch.zeros(1 + count, 1, 1, 40))
    product(torch.ones(64 + count, 96))

torch.set_num_threads(1)
torch.set_default_dtype(torch.bfloat16)
with torch.inference_mode():
    q, product = torch.ones(8, 9, 64), Linear(torch.ones(192, 96))
    for count in (0, 150):
        run(count)
    before = private()
    for count in range(1, 150):
        run(count)
    print(private() - before)
"""


def test_products_of_16_bits_are_not_kept_for_each_length() -> None:
    """oneDNN compiles a product for each shape and keeps it, up to 2 MiB each; lengths and numbers of rows are many."""
    done = subprocess.run(
        interpreter.command("-c", _LENGTHS), env=interpreter.environment(), capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 32 * MIB, f"{int(done.stdout) / MIB:.0f} MiB"
