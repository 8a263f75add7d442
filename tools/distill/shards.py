"""Shards of tensors on disk, `NAME-00007.safetensors`: complete, or not there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ssd.errors import UsageError


def shard_path(directory: Path, name: str, index: int) -> Path:
    return directory / f"{name}-{index:05d}.safetensors"


def is_done(directory: Path, name: str, index: int) -> bool:
    return shard_path(directory, name, index).is_file()


def save(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a file that gets its name once it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata)
    partial.replace(path)


def claim(path: Path, recipe: Mapping[str, object]) -> None:
    """Note in `path` what the files beside it are made from. Raises UsageError if they are made from something else."""
    wanted = json.loads(json.dumps(recipe))
    if path.is_file():
        found = json.loads(path.read_text())
        if differing := sorted(key for key in {*wanted, *found} if wanted.get(key) != found.get(key)):
            raise UsageError(f"{path.parent} was begun with another {', '.join(differing)}: give another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(wanted, indent=1) + "\n")


SHARD_VERSION = 3
"""What a corpus folder was written as; a folder of another version is refused."""


@dataclass(frozen=True)
class Conversation:
    """Token ids of a conversation. The first `prompt` are given; the rest is the target's.

    `opening` is the user message that it opens with, or that the answer it is about was given to."""

    token_ids: list[int]
    prompt: int
    opening: str = ""

    @property
    def answer(self) -> int:
        return len(self.token_ids) - self.prompt


def conversations(path: Path) -> list[Conversation]:
    """Return the conversations of a corpus shard; each has an answer."""
    with safe_open(path, framework="pt") as file:
        names = "token_ids", "lengths", "prompt_lengths", "openings"
        ids, lengths, prompts, openings = (file.get_tensor(name) for name in names)
        messages = json.loads(file.metadata()["prompts"])
    parts = zip(ids.split(lengths.tolist()), prompts.tolist(), openings.tolist(), strict=True)
    return [Conversation(own.tolist(), prompt, messages[opening]) for own, prompt, opening in parts]
