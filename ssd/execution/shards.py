"""Runs one rank's part of a model, in step with the other ranks (tensor parallelism)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.execution.batch import BaseContext, Row
from ssd.execution.meanwhile import Task, nothing
from ssd.execution.runner import Runner
from ssd.layers.ranks import Ranks, part_of
from ssd.models.interface import Model
from ssd.speculation.noise import NoiseCache
from ssd.speculation.sampling import Law, best, checked, perturbed

Tell = Callable[[Sequence[Row], Sequence[Law] | None], None]


class ShardRunner(Runner):
    """A runner of one rank's part of a model. All ranks must run the same batches; only rank 0 has results.

    Rank 0 calls `tell` before each batch; the caller uses it to tell the other ranks."""

    def __init__(
        self,
        model: Model,
        num_pages: int,
        page_size: int,
        deterministic: bool = False,
        attention: str = "auto",
        *,
        ranks: Ranks,
        tell: Tell | None = None,
    ) -> None:
        super().__init__(model, num_pages, page_size, deterministic, attention)
        self._ranks, self._tell = ranks, tell
        ids = ranks.part(model.shape.outputs)
        self._first, self._most = ids.start, -(-model.shape.outputs // ranks.size)
        self._noise = NoiseCache(len(ids), model.device, first=ids.start)

    def forward(self, rows: Sequence[Row], context: BaseContext | None = None, meanwhile: Task = nothing) -> Tensor:
        """As `Runner.forward` at rank 0; of no use at the others. All logits are sent to rank 0."""
        if self._tell is not None:
            self._tell(rows, None)
        logits = super().forward(rows, context, meanwhile)
        outputs, size = self.model.shape.outputs, self._ranks.size
        parts = self._ranks.gather(F.pad(logits, (0, self._most - logits.shape[1])))
        widths = [len(part_of(outputs, rank, size)) for rank in range(size)]
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=False)] or [logits], dim=1)

    def sample(
        self, rows: Sequence[Row], laws: Sequence[Law], context: BaseContext | None = None, meanwhile: Task = nothing
    ) -> list[int] | None:
        """As `Runner.sample` at rank 0; of no use at the others. Ranks send only a token and its score an output.

        What a filter leaves depends on the logits of all ranks."""
        if any(law.filters for law in laws):
            return None
        if self._tell is not None:
            self._tell(rows, laws)
        logits = super().forward(rows, context, meanwhile)
        by_row = zip(logits.split([row.outputs for row in rows]), rows, laws, strict=True)
        scores = torch.cat([perturbed(part, law, row.predicted, self._noise) for part, row, law in by_row])
        ids, values = best(scores)
        parts = self._ranks.gather(torch.stack((ids.double() + self._first, values.double()), dim=-1))
        if not parts:
            return []
        ids, values = torch.stack(parts, dim=1).unbind(-1)
        winner, value = best(values)
        return checked(ids.gather(1, winner[:, None])[:, 0].long(), value)
