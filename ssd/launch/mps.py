"""CUDA's Multi-Process Service: processes that share a GPU run at the same time.

With `--mps` an engine starts a daemon of its own. A draft on the target's GPU gets few of its processors."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from ssd.errors import UsageError

_TOOL = "nvidia-cuda-mps-control"
_PIPES, _DEFAULT_PIPES = "CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"
_LOGS = "CUDA_MPS_LOG_DIRECTORY"
# Ends the daemon when its standard input is closed, even because this process was killed.
_ENDS = f'read -r _; echo quit -t 5 | {_TOOL}; rm -rf "$0"'
_TIMEOUT_S = 5.0

# Percent of the processors. A draft mostly waits; a memory-bound verification loses little. Guessed, not measured.
DRAFT_SHARE = 20

State = Literal["running", "stopped", "missing"]


def state() -> State:
    """Return the daemon's state. `missing`: neither a daemon nor the program that would start one."""
    if shutil.which(_TOOL) is None:  # a container may have only the daemon's pipes
        return "running" if (Path(os.environ.get(_PIPES, _DEFAULT_PIPES)) / "control").exists() else "missing"
    try:
        done = subprocess.run(
            [_TOOL], input="get_server_list\n", capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return "stopped"
    return "running" if done.returncode == 0 else "stopped"


@contextmanager
def service() -> Iterator[dict[str, str]]:
    """Run a daemon while the block lasts, and yield the environment variables by which processes find it.

    It also ends when this process is killed. Raises UsageError if it does not start."""
    if shutil.which(_TOOL) is None:
        raise UsageError(f"--mps needs {_TOOL}, which is not installed here")
    folder = tempfile.mkdtemp(prefix="ssd-mps-")
    where = {_PIPES: folder, _LOGS: folder}
    environment, said = os.environ | where, Path(folder) / "said"
    with subprocess.Popen(
        ["sh", "-c", _ENDS, folder], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment, process_group=0
    ):
        with said.open("w") as words:  # a daemon keeps a pipe open
            try:
                subprocess.run(
                    [_TOOL, "-d"], stdout=words, stderr=words, check=True, timeout=_TIMEOUT_S, env=environment
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise UsageError(f"--mps: {error}: {said.read_text().strip()}") from None
        yield where


def advice(found: State) -> str:
    if found == "missing":
        return f"CUDA's MPS, under which they would run side by side, is not installed ({_TOOL})"
    pipes = os.environ.get(_PIPES)
    where = "" if pipes is None else f"{_PIPES}={shlex.quote(pipes)} "
    return f"they run side by side once CUDA's MPS does: give --mps, or start it: {where}{_TOOL} -d"


def draft_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return variables for a draft on the target's GPU, without those that the user has `given`."""
    ours = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(DRAFT_SHARE)}
    return {name: value for name, value in ours.items() if name not in given}
