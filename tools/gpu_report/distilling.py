"""Start the commands of `tools.distill` for programme 3, which makes its corpus and its draft in one folder."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ssd.errors import UsageError
from tools import processes
from tools.gpu_report.job import Job

FOLDER_VARIABLE = "SSD_DRAFT_FOLDER"
# Another seed than that of any corpus that the packaged draft has seen.
_SEED = "3907"
_TINY_PROMPTS = 48


def folder() -> Path:
    """Return where files are that outlast a call on a machine that stays warm."""
    return Path(os.environ.get(FOLDER_VARIABLE, "/tmp/ssd-draft"))


@dataclass(frozen=True)
class Recipe:
    """Name what is made in the folder `out`: `corpus` and `student` are flags of `tools.distill`."""

    target: Path
    out: Path
    corpus: tuple[str, ...]
    student: tuple[str, ...]
    tiny: bool

    def command(self, device: str, *more: str) -> list[str]:
        """Return the arguments of `tools.distill`."""
        where = ("--out", str(self.out), "--device", device)
        return [str(self.target), *where, *self.corpus, *self.student, *more]


def recipe(job: Job, tiny: bool) -> Recipe:
    """Return what to make: of the joined target, or of a tiny one if so told or if there is no other in a rehearsal.

    Raises UsageError if the target is not there."""
    target = folder() / "target"
    small = tiny or job.tiny
    if tiny or (small and not (target / "config.json").is_file()):
        target = folder() / "tiny-target"
        if not target.is_dir():
            _make_tiny(target)
        student: tuple[str, ...] = ("--layers", "0,2")
    elif (target / "config.json").is_file():
        student = ("--layers", "0,1,2,3,26,27,28,29", "--draft-vocab", "16384", "--store", "int4")
    else:
        raise UsageError(f"no target in {target}: its pieces were not joined")
    corpus: tuple[str, ...] = ("--conversations", str(2**20), "--shard", "2048", "--seed", _SEED)
    if small:
        corpus = ("--conversations", "96", "--shard", "24", "--answer-tokens", "24")
    if job.tiny:  # what is rehearsed need not be able to end a message
        prompts = folder() / "prompts.jsonl"
        lines = (json.dumps({"prompt": f"say {number}"}) + "\n" for number in range(_TINY_PROMPTS))
        prompts.write_text("".join(lines))
        corpus += ("--prompts", str(prompts))
    return Recipe(target, folder() / (f"{target.name}-draft"), corpus, student, small)


def _make_tiny(directory: Path) -> None:
    """Make a random target that chats."""
    from tests.models import tiny

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 300}
    directory.mkdir(parents=True)
    tiny.tokenizer(tiny.llama(directory, **sizes))


@contextlib.contextmanager
def started(
    module: str, arguments: Sequence[str], variables: Mapping[str, str] = {}
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a module in a process, which has ended when the block ends. What it says is in the log."""
    environment = {**processes.environment(), **variables}
    process = subprocess.Popen(processes.command(module, *arguments), stdin=subprocess.DEVNULL, env=environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2.0)
            process.kill()
            process.wait()


def ticks(process: subprocess.Popen[bytes], job: Job, seconds: float = 1.0) -> Iterator[None]:
    """Yield again and again until the process ends or the job has no time left."""
    while process.poll() is None and job.left() > 0:
        yield
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(min(seconds, max(0.01, job.left())))


def ended(process: subprocess.Popen[bytes]) -> str:
    """Return how a process ended."""
    code = process.poll()
    return "stopped at its limit" if code is None else "done" if code == 0 else f"exit status {code}"


def since(began: float) -> float:
    return time.monotonic() - began
