"""Finds the kernels for this processor: the wheel's, else the C files here, compiled once into the cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import math
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

from ssd.system.files import cache_dir, lock

log = logging.getLogger("ssd.kernels")

_HERE = Path(__file__).parent
# Processor seconds of the files that take longest, on a Xeon. They begin first; any other takes at most 2.
_SECONDS = {"rounded.c": 36, "grouped.c": 16, "products.c": 3}
_SOURCES = sorted(_HERE.glob("*.c"), key=lambda file: -_SECONDS.get(file.name, 0))
_HEADERS = sorted(_HERE.glob("*.h"))
# Floating-point flags and traps would keep loops from becoming vectors. The order of sums is kept.
_FLAGS = ("-O3", "-fopenmp", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
_NATIVE = "-march=native"
_MOST_SECONDS = 900  # processor time of one file; how long that takes depends on what else runs
_PATIENCE_S = 3600  # for a compiler that takes no processor time
_SCRATCH = "compiling-"
_COMPILERS = ("cc", "gcc", "clang")

PREBUILT = "prebuilt"
"""The folder of a wheel's kernels."""
_AVX2 = ("avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
LEVELS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "v4-vnni": (("-march=x86-64-v4", "-mavx512vnni"), (*_AVX512, "avx512_vnni")),
    "v3-vnni": (("-march=x86-64-v3", "-mavxvnni"), (*_AVX2, "avx_vnni")),
    "v4": (("-march=x86-64-v4",), _AVX512),
    "v3": (("-march=x86-64-v3",), _AVX2),
}
"""Name -> options of the compiler, and the flags in /proc/cpuinfo without which a processor cannot run it. These are
the processors that `simd.h` tells apart; older ones have no products. `fastest` decides by time which one serves."""
_SAMPLES, _SAMPLE_ROWS, _SAMPLE_BYTES = 9, (1, 2, 5, 8, 16), 2**21


def expected() -> bool:
    flags = _processor().split()
    vectors = {"avx2", "fma", "f16c"} <= {*flags} or platform.machine() == "aarch64"
    return vectors and os.environ.get("SSD_KERNELS") != "0" and bool(compiler() or runnable(flags))


class Compilation:
    done = total = 0


compilation = Compilation()


@cache
def library() -> Path | None:
    """Return the path of the compiled kernels; None with `SSD_KERNELS=0`, or if they cannot be compiled.

    The wheel's kernels come first, unless `CC` names a compiler. Concurrent calls, also of other processes, wait."""
    if os.environ.get("SSD_KERNELS") == "0":
        return None
    if not os.environ.get("CC") and (packaged := prebuilt(_processor().split())):
        return packaged
    command = compiler()
    if not command:
        log.warning(
            "found no C compiler: torch has to do without our kernels, which is two to four times slower; install one "
            "(Debian: apt-get install gcc), or name it in CC"
        )
        return None
    try:
        return _compiled(shlex.split(command))
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        log.warning("%s did not compile our kernels, torch has to do without: %s", command, error)
        return None


def compiler() -> str:
    return (os.environ.get("CC") or next(filter(shutil.which, _COMPILERS), "")).strip()


def _compiled(compiler: list[str]) -> Path:
    command = [*compiler, _NATIVE]
    parts = [file.read_bytes() for file in (*_SOURCES, *_HEADERS)]
    parts += [" ".join((*command, *_FLAGS)).encode(), _processor().encode()]
    final = cache_dir() / "kernels" / f"cpu-{hashlib.sha256(b'|'.join(parts)).hexdigest()[:16]}.so"
    if not final.exists():
        with lock(final.parent / ".compiling"):
            for left in (*final.parent.glob(f"{_SCRATCH}*"), *final.parent.glob("tmp*")):  # by a killed process
                shutil.rmtree(left, ignore_errors=True)
            if not final.exists():
                log.warning("compiling kernels, once: about a minute, more on a busy machine")
                compile_into(final, command)
    return final


def compile_into(final: Path, command: list[str], load: bool = True) -> None:
    """Compile with the compiler and options of `command`; the file appears when it is whole and, with `load`, loads.

    Raises what writing files and running a compiler raise."""
    final.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=final.parent) as scratch,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
        _process_group() as start,
    ):

        def run(*arguments: str) -> None:
            process = start(
                ["sh", "-c", f'ulimit -S -t {_MOST_SECONDS}; exec "$@"', "sh", *command, *_FLAGS, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**os.environ, "TMPDIR": scratch},
            )
            _, errors = process.communicate(timeout=_PATIENCE_S)
            if process.returncode:
                raise ChildProcessError(errors.strip() or f"it ends with status {process.returncode}")

        def compile_file(file: Path) -> str:
            to = f"{scratch}/{file.stem}.o"
            run("-c", str(file), "-o", to)
            compilation.done += 1
            return to

        compilation.done, compilation.total = 0, len(_SOURCES)
        try:
            made = Path(scratch) / final.name
            run("-o", str(made), *pool.map(compile_file, _SOURCES), "-lm")
        finally:
            compilation.total = 0
        if load:
            _load_openmp()
            ctypes.CDLL(str(made))
        made.replace(final)


@contextmanager
def _process_group() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Yield a `Popen` for programs of a group that is killed when the block or this process ends, however it does.

    Its leader waits for the end of a pipe that this process alone keeps open. Killing a compiler would leave the
    programs that it starts, as `cc1`."""
    command = ["sh", "-c", "read -r _; kill -s KILL 0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0) as leader:
        starting = Lock()

        def start(arguments: Sequence[str], **how: Any) -> subprocess.Popen[str]:
            with starting:  # a program is in the group before that is killed, or does not start
                if leader.returncode is not None:
                    raise ChildProcessError("its process group has ended")
                return subprocess.Popen(arguments, text=True, process_group=leader.pid, **how)

        try:
            yield start
        finally:
            with starting:
                leader.communicate()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def file_name(level: str) -> str:
    return f"cpu-{level}.so"


def _load_openmp() -> None:
    torch = find_spec("torch")
    for place in (torch and torch.submodule_search_locations) or ():
        file = Path(place) / "lib" / "libgomp.so.1"
        if file.exists():
            ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)


def runnable(flags: list[str], folder: Path | None = None) -> list[Path]:
    files = [((folder or _HERE / PREBUILT) / file_name(level), needed) for level, (_, needed) in LEVELS.items()]
    return [file for file, needed in files if {*needed} <= {*flags} and file.exists()]


def prebuilt(flags: list[str], folder: Path | None = None) -> Path | None:
    files = runnable(flags, folder)
    if files:
        _load_openmp()
    try:
        if len(files) > 1:
            return fastest(files)
        for file in files:
            ctypes.CDLL(str(file))
            return file
    except OSError as error:  # its OpenMP is missing, or this is another C library
        log.warning("the packaged kernels do not load: %s", error)
    return None


def fastest(files: list[Path]) -> Path:
    """Return the library whose products take the least time here, timed once and noted. Raises OSError."""
    made = [(str(file), file.stat().st_mtime_ns) for file in files]
    note = cache_dir() / "kernels" / f"fastest-{hashlib.sha256(repr((made, _processor())).encode()).hexdigest()[:16]}"
    names = {file.name: file for file in files}
    if known := names.get(_noted(note)):
        return known
    libraries, memory = [ctypes.CDLL(str(file)) for file in files], ctypes.create_string_buffer(_SAMPLE_BYTES)
    seconds = [[math.inf] * len(_SAMPLE_ROWS) for _ in files]
    for _ in range(_SAMPLES):
        for library, own in zip(libraries, seconds, strict=True):
            for index, rows in enumerate(_SAMPLE_ROWS):
                began = time.perf_counter()
                library.sample_product(ctypes.c_int64(rows), memory)
                own[index] = min(own[index], time.perf_counter() - began)
    best = files[min(range(len(files)), key=lambda index: sum(seconds[index]))]
    if _noted(note) not in names:  # another process may have been faster: all use the same
        try:
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(best.name)
        except OSError as error:
            log.warning("the fastest kernels, %s, cannot be noted: %s", best.name, error)
    return names.get(_noted(note), best)


def _noted(note: Path) -> str:
    try:
        return note.read_text(errors="replace")
    except OSError:
        return ""
