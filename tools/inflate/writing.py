"""Writes a checkpoint of any size with little memory: one shard at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from ssd.plugins.bench.runs import watched
from tools.inflate.tensors import Part


def shards(parts: Iterable[Part], item_bytes: int, most_bytes: int) -> Iterator[list[Part]]:
    """Yield the parts in order, cut before a shard exceeds `most_bytes`; a larger tensor has its own shard."""
    shard: list[Part] = []
    size = 0
    for part in parts:
        nbytes = item_bytes * torch.Size(part.shape).numel()
        if shard and size + nbytes > most_bytes:
            yield shard
            shard, size = [], 0
        shard.append(part)
        size += nbytes
    yield shard


def write(directory: Path, cut: list[list[Part]], item_bytes: int) -> None:
    """Write the shards as safetensors files, and the index that tells which tensor is in which."""
    names = [f"model-{number:05}-of-{len(cut):05}.safetensors" for number in range(1, len(cut) + 1)]
    for name, shard in watched(list(zip(names, cut, strict=True)), "writing"):
        save_file({part.name: part.make() for part in shard}, directory / name, metadata={"format": "pt"})
    total = sum(item_bytes * torch.Size(part.shape).numel() for shard in cut for part in shard)
    where = {part.name: name for name, shard in zip(names, cut, strict=True) for part in shard}
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
