"""The rehearsal's conclusions from the stand-in's log and cache, and the files that a device carries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.gpu_rehearsal import launches, resources
from tools.gpu_rehearsal.standin import CARRIED, bare_checkout
from tools.processes import ROOT

LOG = """FAKECUDA[1] GRAPH launches 170 attentions 16 layers 16 rounds 1
FAKECUDA[1] WARNING cudaMemcpyAsync of pageable memory in a capture (1 <- 0, 64 bytes)
FAKECUDA[2] GRAPH launches 5 attentions 0 layers 0 rounds 1
FAKECUDA[2] GRAPH launches 1000 attentions 0 layers 0 rounds 0
FAKECUDA[2] WARNING cudaMemcpyAsync of pageable memory in a capture (1 <- 0, 64 bytes)
FAKECUDA[2] END launches 3, graph launches 3, graphs 2, host copies 1, syncs 1, memory 4 MiB
"""


def test_a_log_says_which_rules_were_broken_and_what_was_captured() -> None:
    ((line, times),) = launches.broken_rules(LOG).items()
    assert line.startswith("WARNING cudaMemcpyAsync of pageable memory") and times == 2
    verify, draw, other = launches.graphs(LOG)
    assert (verify.kind, draw.kind) == ("verify", "between")
    assert (most := verify.most()) is not None and 170 <= most < 400
    assert (most := draw.most()) is not None and 5 <= most < 20
    assert other.most() is None  # the report times launches in it
    assert len(launches.counted([verify, draw, other])) == 4


def test_a_graph_of_several_forwards_may_have_the_launches_of_all() -> None:
    step, trunk = launches.Graph(91, 8, 4, 0), launches.Graph(382, 32, 16, 0)
    assert launches.over([step, trunk]) == {}
    assert launches.over([trunk]).keys() == {trunk}  # nothing shows that it is more than one forward
    assert launches.over([step, trunk._replace(launches=440)]).keys() == {trunk._replace(launches=440)}
    assert launches.over([step._replace(launches=120)]).keys() == {step._replace(launches=120)}


def test_a_variant_with_a_stack_is_over_its_ceiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = {"attend_kernel": resources.Use(4096, 255, 1024), "norm_kernel": resources.Use(0, 32, 0)}
    for name in used:
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.cubin").touch()

    def read(cubin: Path) -> tuple[resources.Group, resources.Use]:
        return resources.Group(cubin.stem, "f32", "64x256 . 256x32", ""), used[cubin.stem]

    monkeypatch.setattr(resources, "read", read)
    lines, over = resources.table(tmp_path)
    assert lines[-1] == "2 variants in 2 groups; 1 with a stack"
    assert over == ["attend_kernel [f32] 64x256 . 256x32: 4096 bytes of stack, 1024 shared"]


@pytest.mark.parametrize("pin", ["", "word"])
def test_the_carried_site_changes_the_key_of_the_devices_triton_alone(pin: str) -> None:
    """Nothing is imported before the program does it."""
    program = (
        "import sys; assert 'triton' not in sys.modules; import triton, triton.runtime.cache as cache; "
        "print(getattr(cache, 'triton_key', lambda: 'none')() == 'word', triton.__version__ == '3.6.0')"
    )
    environment = os.environ | {"PYTHONPATH": str(CARRIED), "PIN_TRITON": pin}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    pinned, known = done.stdout.split()
    assert pinned == (known if pin else "False")


def test_a_bare_checkout_has_the_tools_and_no_history() -> None:
    with bare_checkout(ROOT) as folder:
        assert (folder / "tools/gpu_report/__main__.py").exists() and (folder / "tests/gpu/conftest.py").exists()
        assert not (folder / ".git").exists()
