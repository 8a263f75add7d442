"""The kernels are not only right under the interpreter: the compiler takes them too, for a GPU that is not here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FP8 = "fp8", (8, 16, 32)


@pytest.mark.timeout(600)
@pytest.mark.thorough
@pytest.mark.parametrize("capability", [90, 80])
def test_the_kernels_compile_for_a_gpu(tmp_path: Path, capability: int) -> None:
    """With products on tensor cores but in 32 bits, and keys copied while others are worked on; without spills."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.layers.compile_kernels", str(capability)],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stderr
    found = re.sub(r", [\d.]+ instructions a weight", "", done.stdout).splitlines()
    expected = [
        "attend, 16 bits, heads of 128: mma.sync, copies ahead",
        "attend, 16 bits, heads of 128, deterministic: wgmma, copies ahead",
        "attend, 16 bits, heads of 256: mma.sync, copies ahead",
        "attend, 16 bits, heads of 256, deterministic: wgmma, copies ahead",
        "attend, 32 bits, heads of 128: copies ahead",
        "attend, 32 bits, heads of 128, deterministic: copies ahead",
        "attend, 32 bits, heads of 256: copies ahead",
        "attend, 32 bits, heads of 256, deterministic: copies ahead",
        "attend, 16 bits, heads of 64, deterministic, WINDOWED, CAPPED: wgmma, copies ahead",
        "attend, 16 bits, heads of 128, FP8: mma.sync, copies ahead",
        "merge, heads of 128",
        "merge, heads of 256",
        "norm_kernel",
        "gate_kernel",
        "turn_kernel",
        "noise_kernel",
        "best_kernel",
        "last_kernel",
        "warm_kernel",
        "turn_kernel, FP8 cache",
        "lowest_kernel",
        "adjust_kernel",
        "decide_kernel",
        "recent_kernel",
        "build_kernel",
        *(
            f"packed, {kind}, {rows}: {'wgmma' if rows == '128 rows' else 'mma.sync'}, copies ahead"
            for kind, counts in (("4 bits with offsets", (8, 16)), ("4 bits", (8, 16, 32)), ("8 bits", (8, 32)), FP8)
            for rows in (*(f"{count} rows" for count in (*counts, 128)), "float16")
        ),
        "sum_kernel",
        "convolve_kernel",
        "delta_kernel",
    ]
    products = "wgmma" if capability == 90 else "mma.sync"
    assert found == [f"sm_{capability} {line.replace('wgmma', products)}" for line in expected]
