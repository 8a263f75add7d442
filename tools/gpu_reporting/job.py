"""What every part of the report is told."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from ssd.bench.datasets import random_ids, texts
from ssd.client import Prompt
from ssd.config import DType
from ssd.models import hub
from ssd.models.checkpoint import inspect, tokenizer_vocabulary

Row = dict[str, Any]
"""What was found, under the key `name`: a later row of the same name takes the place of an earlier one. `ok` is False
where something is wrong, not merely slow."""


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`target` and `draft` are a pair with real texts, `prompts` a JSONL file of them; without one prompts are random
    ids. A part should end by `deadline` (of time.monotonic); soon after it, it is killed."""

    device: str
    draft_devices: tuple[str, ...]
    tiny: bool
    target: str
    draft: str
    prompts: str | None
    deadline: float

    def left(self) -> float:
        """Seconds."""
        return self.deadline - time.monotonic()

    @property
    def dtype(self) -> DType:
        """In which results are exact or audited: what a CPU is deterministic in, and what GPUs are used for."""
        return "float32" if self.device == "cpu" else "bfloat16"

    def asked(self, count: int) -> list[Prompt]:
        """So many prompts for the pair."""
        directory = hub.ensure(self.target)
        if self.prompts is not None and tokenizer_vocabulary(directory) is not None:
            return list(texts(self.prompts, count))
        return list(random_ids(count, 12, int(inspect(directory, weights=False).config["vocab_size"]), seed=0))


def config_folder(folder: Path, name: str, config: dict[str, Any]) -> str:
    """A checkpoint that is a config.json and nothing else, for random weights."""
    (folder / name).mkdir()
    (folder / name / "config.json").write_bytes(msgspec.json.encode(config))
    return str(folder / name)
