"""What the target shows of its hidden states to a draft that is an EAGLE-3 head."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch

from ssd.execution.batch import Showing
from ssd.ipc.features import FeatureArena, Part, extend_tags
from ssd.target.scheduler import Scheduled


class FeatureExport:
    """Writes the hidden states after `layers` layers of every token of every step: a rejected one's are found by
    nobody, and whether it will be is not known before."""

    def __init__(self, arena: FeatureArena, layers: tuple[int, ...]) -> None:
        self._arena, self.layers = arena, layers

    def write(self, batch: Items[Scheduled], plan: Showing) -> None:
        """`plan` is that of the batch and was asked to keep `layers`."""
        parts = []
        for sequence, row in ((part.sequence, part.row) for part in batch):
            tags = sequence.tags
            del tags[row.start :]
            extend_tags(tags, sequence.tokens[len(tags) : row.start])
            extend_tags(tags, row.token_ids)
            parts.append(Part(sequence.slot, row.pages, row.start, tags[row.start :]))
        self._arena.write(parts, torch.cat([plan.shown[layer] for layer in self.layers], dim=-1))
