"""Late compiles are told: Triton really compiles here, for a GPU that is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ssd.config.params import Speculation
from tests.draft.audit import world_in
from tests.draft.pair import Draft, Pair, config
from tools.gpu_report.health import LATE
from tools.processes import ROOT

PROGRAM = """
import logging, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ssd.kernels.gpu import watch_compiles
from ssd.layers.triton_kernels import merge_kernel

constants = {"DIM": 16, "MOST": 16, "BLOCK_S": 16, "BLOCK_D": 16, "PDL": False}
pointers = dict.fromkeys(("parts", "part_totals", "out", "totals"), "*fp32")
kinds = dict.fromkeys(constants, "constexpr") | pointers | {"results": "i32", "splits": "i32"}

def compile(warps):
    signature = {name: kinds[name] for name in merge_kernel.arg_names}
    source = ASTSource(merge_kernel, signature, constants)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})

logging.basicConfig(stream=sys.stdout, format="%(message)s")
noted = []
watch_compiles(torch.device("cpu"), lambda: noted.append("never"))
compile(1)
watch_compiles(torch.device("cuda", 0), lambda: noted.append("late"))
compile(2)
compile(1)
print(noted)
"""


def test_a_kernel_that_is_compiled_or_loaded_late_is_told_and_counted(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    (program := tmp_path / "program.py").write_text(PROGRAM)
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    compiled, loaded, noted = done.stdout.splitlines()
    assert compiled.startswith("Triton compiled merge_kernel after the start, in ")
    assert loaded.startswith("Triton loaded merge_kernel after the start, in ")
    assert noted == "['late', 'late']"
    assert LATE.findall(done.stdout) == ["merge_kernel"] * 2  # by which the GPU report knows them


def test_late_compiles_of_both_processes_are_in_the_targets_load(tmp_path: Path) -> None:
    settings, world = config(Speculation("ssd", 4, (3,), "jit")), world_in(tmp_path)
    draft = Draft(settings, world.draft)
    engine = Pair(settings, world.target, draft).engine
    engine.note_compile()
    draft._writer.note_compile()
    draft._writer.note_compile()
    assert (engine.load().late_compiles, engine.load().draft_late_compiles) == (1, 2)
