"""Tell every part of the report what to measure, and define its answers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from ssd.client import Prompt
from ssd.config.engine import DType
from ssd.models import hub
from ssd.models.checkpoint import inspect
from ssd.models.vocabularies import vocabulary_of
from tools.inflate.sizes import LIKE, Like, Sizes

Row = dict[str, Any]
"""A finding, under the key `name`: a later row of the same name takes the place of an earlier one. `ok` is False where
something is wrong, not merely slow."""

TINY = Like("llama", 1100, Sizes(64, 2, 4, 2, 16, 128))
_MADE = LIKE["llama-1b"]
# Layers that the draft of a made pair lacks: it then agrees with the target now and then.
_LACKS = 1


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Name what to measure. `target` and `draft` are a pair, `dataset` names its prompts if it has a tokenizer.

    `made`: the pair has random weights. A part should end by `deadline` (of time.monotonic); soon after, it is
    killed. It may leave files in the folder `out`, named after its `step`."""

    device: str
    draft_devices: tuple[str, ...]
    tiny: bool
    target: str
    draft: str
    made: bool
    dataset: str
    out: str
    deadline: float
    step: str = ""

    @property
    def log(self) -> Path:
        """Return the file that gets all that the steps print."""
        return Path(self.out) / "log.txt"

    def left(self) -> float:
        """Return the seconds left."""
        return self.deadline - time.monotonic()

    @property
    def dtype(self) -> DType:
        """Return the type in which ids are compared: a CPU's deterministic one, or that GPUs are used for."""
        return "float32" if self.device == "cpu" else "bfloat16"

    @property
    def load_format(self) -> str:
        """Return how an engine loads the pair."""
        return "dummy" if self.made else "auto"

    def asked(self, count: int) -> list[Prompt]:
        """Return `count` prompts for the pair: random ids if it has no tokenizer."""
        from ssd.plugins.bench.datasets import RANDOM, prompts  # the core's tests import this module without the plugin

        directory = hub.ensure(self.target)
        dataset = RANDOM if vocabulary_of(directory) is None else self.dataset
        return prompts(dataset, count, int(inspect(directory, weights=False).config["vocab_size"]), length=12)


def config_folder(folder: Path, name: str, config: dict[str, Any]) -> str:
    """Make a checkpoint that is only a config.json, for random weights. Returns its folder."""
    (folder / name).mkdir()
    (folder / name / "config.json").write_bytes(msgspec.json.encode(config))
    return str(folder / name)


def made_pair(folder: Path, tiny: bool) -> tuple[str, str]:
    """Make a target of random weights and a draft that is the same model with fewer layers.

    Random weights are drawn by name, so both have the same ones where both run on devices of one kind."""
    like = TINY if tiny else _MADE
    config = like.config(2048)
    layers = like.sizes.num_hidden_layers - _LACKS
    return (
        config_folder(folder, "made-target", config),
        config_folder(folder, "made-draft", config | {"num_hidden_layers": layers}),
    )
