"""The products have the same bits on every processor: a C program with the kernels is compiled for each, and run here
or by an emulator. `test_groups.py` compares the bits of this processor with those that are right."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from ssd.kernels import build

HERE, KERNELS = Path(__file__).parent, Path(build.__file__).parent
FILES = ("groups", "grouped", "products", "rounded", "team")
SOURCES = (HERE / "products_main.c", *(KERNELS / f"{name}.c" for name in FILES))
X86 = {"haswell": "avx2", "x86-64-v4": "avx512bw"}  # and one feature of /proc/cpuinfo that it needs
ARM = ("armv8-a", "armv8.2-a+dotprod", "armv8.6-a")
ARM_COMPILER, ARM_EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")]


def hashes(compiler: str, processor: str, folder: Path, *emulator: str) -> list[str]:
    """What the program prints: a line for each kind of product."""
    program = str(folder / f"{compiler}-{processor}")
    flags = ("-O1", f"-march={processor}", "-static", "-fno-math-errno", "-fno-trapping-math", f"-I{KERNELS}")
    subprocess.run([compiler, *flags, "-o", program, *map(str, SOURCES), "-lm", "-pthread"], check=True)
    printed = subprocess.run([*emulator, program], check=True, capture_output=True, text=True).stdout
    return printed.splitlines()


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    found = hashes("cc", "native", tmp_path_factory.mktemp("native"))
    assert len(found) == len(set(found)) > 100 and found[-1].startswith("found 1 of 8 bits")
    return found


@pytest.mark.parametrize("processor", X86)
def test_an_older_processor(processor: str, native: list[str], tmp_path: Path) -> None:
    if platform.machine() != "x86_64" or X86[processor] not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip(f"this processor does not run programs for {processor}")
    assert hashes("cc", processor, tmp_path) == native


@pytest.mark.parametrize("processor", ARM)
def test_an_arm_processor(processor: str, native: list[str], tmp_path: Path) -> None:
    missing = [program for program in (ARM_COMPILER, ARM_EMULATOR) if shutil.which(program) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)} (Debian: gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user)")
    assert hashes(ARM_COMPILER, processor, tmp_path, ARM_EMULATOR, "-cpu", "max") == native


def test_a_processor_without_products_has_all_other_kernels(tmp_path: Path) -> None:
    """One with neither AVX2 nor AVX-512: the library loads, and says that it has no products."""
    if platform.machine() != "x86_64":
        pytest.skip("needs a compiler for x86-64")
    made, sources = tmp_path / "old.so", sorted(map(str, KERNELS.glob("*.c")))
    subprocess.run(
        ["cc", "-O0", "-march=x86-64", "-fopenmp", "-shared", "-fPIC", "-o", made, *sources, "-lm"], check=True
    )
    assert ctypes.CDLL(str(made), mode=os.RTLD_NOW).has_products() == 0
