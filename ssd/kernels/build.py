"""Compiles the C files beside it for this very processor, once, into the cache."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from ssd.cache import cache_dir

log = logging.getLogger("ssd.kernels")

_HERE = Path(__file__).parent
_SOURCES, _HEADERS = sorted(_HERE.glob("*.c")), sorted(_HERE.glob("*.h"))
# Nobody asks for the flags and traps of mathematics, which would keep loops from becoming vectors. Sums stay in order.
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
_SECONDS = 180  # a compiler may have to share the machine
_COMPILERS = ("cc", "gcc", "clang")


@cache
def library() -> Path | None:
    """The compiled kernels; None where they cannot be had, with a warning that says why, or with `SSD_KERNELS=0`."""
    if os.environ.get("SSD_KERNELS") == "0":
        return None
    command = (os.environ.get("CC") or next(filter(shutil.which, _COMPILERS), "")).strip()
    if not command:
        log.warning("found no C compiler: torch has to do without our kernels, which is slower")
        return None
    try:
        return _compiled(shlex.split(command))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        cause = getattr(error, "stderr", None) or str(error)
        log.warning("%s did not compile our kernels, torch has to do without: %s", command, cause.strip())
        return None


def _compiled(compiler: list[str]) -> Path:
    """Raises what making a file and running a compiler raise."""
    parts = [file.read_bytes() for file in (*_SOURCES, *_HEADERS)]
    parts += [" ".join((*compiler, *_FLAGS)).encode(), _processor().encode()]
    folder = cache_dir() / "kernels"
    final = folder / f"cpu-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"
    if final.exists():
        return final
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / final.name
        command = [*compiler, *_FLAGS, "-o", str(made), *map(str, _SOURCES), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS)
        ctypes.CDLL(str(made))  # a file that does not load is not kept
        made.replace(final)
    return final


def _processor() -> str:
    """What instructions there are: a cache may be on a disk that machines share."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())
