"""A stand-in for CUDA: the device's torch and Triton over stub libraries, on a machine without a GPU.

`stubs/runtime.c` takes the place of libcudart, `stubs/driver.c` that of libcuda; `stubs/generate.py` writes the other
libraries from the symbols that torch needs.

| real | not real |
|---|---|
| caching allocator, private pools of graphs, pointers | what a kernel computes: kernels do nothing |
| rules of capture: what breaks them is an error, and a line in the log | time, bandwidth |
| Triton compiles for sm_90 with its own ptxas | loading and running the result; cuBLAS's choices |
| copies and sets up to 64 MiB, also in graphs | larger copies are left out |
| page-locking, CUDA IPC between processes | races and waits: streams run at once, in order; MPS; a second GPU |

It shows illegal captures, wrong pointers, missing arguments, imports, APIs that differ between versions, and processes
that do not start. It cannot show a wrong number: a test that compares numbers fails here, or passes by chance."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ssd.errors import UsageError

STUBS = Path(__file__).parent / "stubs"
CARRIED = Path(__file__).parent / "carried"
PIN = "ssd"
# Versions of the device. torch comes without NVIDIA's libraries (2.5 GB): the stubs take their place.
_PYTHON = "3.12"
_TORCH = ("torch==2.11.0", "triton==3.6.0")
_AROUND = (
    *("filelock", "typing-extensions", "setuptools<82", "sympy", "networkx", "fsspec", "jinja2", "numpy", "packaging"),
    *("transformers==5.17.0", "huggingface_hub==1.33.0", "tokenizers==0.23.2", "safetensors"),
    *("click", "rich", "pyyaml", "requests", "tqdm"),
    *("pytest", "pytest-xdist", "pytest-timeout", "hypothesis"),
)
_HEADERS = ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88")
# Packages that the device lacks; the rest of ssd's dependencies is there.
_WHEELS = {"pyzmq": "", "msgspec": "", "gguf": "", "llguidance": ">=1.9,<2"}
_PLATFORMS = ("manylinux_2_31", "manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")
_TRY = "import torch; x = torch.ones(3, device='cuda'); print(torch.__version__, torch.cuda.get_device_name(x.device))"


def download_wheels(folder: Path) -> None:
    """Fetch the wheels that the device lacks, for its Python, unless they are there."""
    if all(any(folder.glob(f"{name}-*.whl")) for name in _WHEELS):
        return
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", _PYTHON, "--implementation", "cp"]
    command += [word for platform in _PLATFORMS for word in ("--platform", f"{platform}_x86_64")]
    subprocess.run([*command, "-d", str(folder), *map("".join, _WHEELS.items())], check=True)


class StandIn:
    """Owns a folder `home` (2 GB) with a Python environment and the stub libraries."""

    def __init__(self, home: Path, cache: Path, log: Path) -> None:
        """`cache`: Triton's. Its files hold absolute paths, so it has the same name on the device. `log` grows."""
        self.home, self.cache, self.log = home, cache, log

    @property
    def site(self) -> Path:
        """The folder of the environment's packages."""
        return next(self.home.glob("venv/lib/python3*/site-packages"))

    def make(self, wheels: Path) -> None:
        """Make what is missing or was made of other words: a minute, and 0.75 GB to fetch, the first time."""
        self.home.mkdir(parents=True, exist_ok=True)
        with open(self.home / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            python = _device_python()
            self._step("venv", python, lambda: _again([python, "-m", "venv", "--clear", str(self.home / "venv")]))
            self._step("torch", f"{python} {_TORCH}", lambda: self._pip("install", "--no-deps", *_TORCH))
            self._step("around", f"{python} {_AROUND}", lambda: self._pip("install", *_AROUND))
            self._step("headers", str(_HEADERS), self._fetch_headers)
            sources = sorted(path for path in STUBS.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
            digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
            self._step("stubs", f"{python} {_TORCH} {digest}", self._build_stubs)
            carried = sorted(wheels.glob("*.whl"))
            self._step("wheels", str([wheel.name for wheel in carried]), lambda: self._install_carried(carried))
            shutil.rmtree(self.home / "inductor", ignore_errors=True)  # what torch compiled, which no device has
        print(self.run(Path("/"), ["python", "-c", _TRY], network=True, capture_output=True, text=True).stdout.strip())

    def _step(self, name: str, words: str, make: Callable[[], object]) -> None:
        done = self.home / f"{name}.done"
        if done.exists() and done.read_text() == words:
            return
        done.unlink(missing_ok=True)
        began = time.monotonic()
        make()
        done.write_text(words)
        print(f"stand-in, {name}: {time.monotonic() - began:.0f} s", flush=True)

    def _pip(self, verb: str, *words: str) -> None:
        options = ("-qq", "--no-compile", "--no-warn-conflicts", "--disable-pip-version-check")
        _again([str(self.home / "venv/bin/python"), "-m", "pip", verb, *options, *words])

    def _fetch_headers(self) -> None:
        shutil.rmtree(self.home / "headers", ignore_errors=True)
        self._pip("install", "--no-deps", "--target", str(self.home / "headers"), *_HEADERS)

    def _build_stubs(self) -> None:
        for name in ("lib", "bin"):
            shutil.rmtree(self.home / name, ignore_errors=True)
        (self.home / "lib").mkdir()
        include = next((self.home / "headers").rglob("cuda_runtime_api.h")).parent
        libraries = [str(self.site / "torch/lib"), str(include), str(self.home / "lib")]
        _again([str(self.home / "venv/bin/python"), str(STUBS / "generate.py"), *libraries])
        shutil.copytree(STUBS / "bin", self.home / "bin")
        shutil.copy(STUBS / "standin_site.py", self.site)
        (self.site / "standin.pth").write_text("import standin_site\n")

    def _install_carried(self, wheels: Sequence[Path]) -> None:
        """Install them into a folder of their own, as on the device."""
        shutil.rmtree(self.home / "site", ignore_errors=True)
        self._pip("install", "--no-index", "--no-deps", "--target", str(self.home / "site"), *map(str, wheels))

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of a process on the stand-in; none of this machine's caches is used."""
        kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONHOME")}
        found = {
            "PATH": os.pathsep.join((str(self.home / "venv/bin"), str(self.home / "bin"), os.environ["PATH"])),
            "PYTHONPATH": os.pathsep.join((str(self.home / "site"), str(CARRIED))),
            "LD_LIBRARY_PATH": str(self.home / "lib"),
            "TRITON_LIBCUDA_PATH": str(self.home / "lib"),
            "TRITON_CACHE_DIR": str(self.cache),
            "PIN_TRITON": PIN,
            "TORCHINDUCTOR_CACHE_DIR": str(self.home / "inductor"),
            "FAKECUDA_LOG": str(self.log),
            "FAKECUDA_VERBOSE": "1",
            "HOME": str(self.home / "home"),
        }
        return kept | found | dict(more)

    def run(
        self,
        folder: Path,
        command: Sequence[str],
        more: Mapping[str, str] = {},
        network: bool = False,
        **options: object,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a folder. Without `network` only a loopback of its own is there, if this user may do that.

        `options` are those of subprocess.run."""
        (self.home / "home").mkdir(exist_ok=True)
        alone: list[str] = []
        if not network and os.geteuid() == 0 and shutil.which("unshare") and shutil.which("ip"):
            alone = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
        return subprocess.run([*alone, *command], cwd=folder, env=self.environment(more), **options)  # type: ignore[call-overload, no-any-return]


def _again(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"{shlex.join(command[:4])} ...: {(done.stderr or done.stdout).strip()[-1000:]}")


def _device_python() -> str:
    """Return a Python of the device's version, else this one: launchers in Triton's cache fit one version only."""
    others = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{_PYTHON}*/bin/python"))
    for python in (f"python{_PYTHON}", *map(str, others)):
        command = [python, "-c", "import sys; print(sys.executable)"]
        if shutil.which(python):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return done.stdout.strip()
    return sys.executable


@contextmanager
def bare_checkout(root: Path) -> Iterator[Path]:
    """Copy what git knows or does not ignore, as it travels to a device: no history, no environment, no build."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, capture_output=True, check=True, text=True).stdout.split("\0")
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        for name in filter(None, names):
            source, copy = root / name, Path(folder) / name
            if source.is_file():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, copy)
        yield Path(folder)
