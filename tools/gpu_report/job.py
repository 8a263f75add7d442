"""What every part of the report is told."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from ssd.bench.datasets import RANDOM, prompts
from ssd.client import Prompt
from ssd.config.engine import DType
from ssd.models import hub
from ssd.models.checkpoint import inspect
from ssd.models.vocabularies import vocabulary_of

Row = dict[str, Any]
"""What was found, under the key `name`: a later row of the same name takes the place of an earlier one. `ok` is False
where something is wrong, not merely slow."""


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to measure. `target` and `draft` are a pair with real texts, `dataset` names their prompts.

    A part should end by `deadline` (of time.monotonic); soon after it, it is killed."""

    device: str
    draft_devices: tuple[str, ...]
    tiny: bool
    target: str
    draft: str
    dataset: str
    deadline: float

    def left(self) -> float:
        """Return the seconds left."""
        return self.deadline - time.monotonic()

    @property
    def dtype(self) -> DType:
        """Return the type in which ids are compared: a CPU's deterministic one, or that GPUs are used for."""
        return "float32" if self.device == "cpu" else "bfloat16"

    def asked(self, count: int) -> list[Prompt]:
        """Return `count` prompts for the pair: random ids if it has no tokenizer."""
        directory = hub.ensure(self.target)
        dataset = RANDOM if vocabulary_of(directory) is None else self.dataset
        return prompts(dataset, count, int(inspect(directory, weights=False).config["vocab_size"]), length=12)


def config_folder(folder: Path, name: str, config: dict[str, Any]) -> str:
    """Make a checkpoint that is only a config.json, for random weights. Returns its folder."""
    (folder / name).mkdir()
    (folder / name / "config.json").write_bytes(msgspec.json.encode(config))
    return str(folder / name)
