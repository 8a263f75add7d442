"""The kernels that a wheel brings along, compiled for the common levels of x86-64, so that no compiler is needed."""

from __future__ import annotations

import ctypes
import logging
from importlib.util import find_spec
from pathlib import Path

log = logging.getLogger("ssd.kernels")

FOLDER = "prebuilt"
_AVX2 = ("avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
LEVELS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "v4-vnni": (("-march=x86-64-v4", "-mavx512vnni"), (*_AVX512, "avx512_vnni")),
    "v3-vnni": (("-march=x86-64-v3", "-mavxvnni"), (*_AVX2, "avx_vnni")),
    "v4": (("-march=x86-64-v4",), _AVX512),
    "v3": (("-march=x86-64-v3",), _AVX2),
}
"""Best first: name -> options of the compiler, and the flags in /proc/cpuinfo that a processor needs for it. These are
the processors that `simd.h` tells apart. Older ones have no products."""


def file_name(level: str) -> str:
    return f"cpu-{level}.so"


def _load_openmp() -> None:
    """Load torch's copy of OpenMP, which the kernels share with it; the system may have none."""
    torch = find_spec("torch")
    for place in (torch and torch.submodule_search_locations) or ():
        file = Path(place) / "lib" / "libgomp.so.1"
        if file.exists():
            ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)


def find(flags: list[str], folder: Path | None = None) -> Path | None:
    """Return the packaged kernels for a processor with these flags; None if there are none that load."""
    folder = folder or Path(__file__).parent / FOLDER
    if folder.is_dir():
        _load_openmp()
    for level, (_, needed) in LEVELS.items():
        file = folder / file_name(level)
        if {*needed} <= {*flags} and file.exists():
            try:
                ctypes.CDLL(str(file))
            except OSError as error:  # its OpenMP is missing, or this is another C library
                log.warning("the packaged kernels do not load: %s", error)
                return None
            return file
    return None
