"""Runs a part of a model over ragged batches, in step with the other ranks (tensor parallelism)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.execution.batch import Row, Showing
from ssd.execution.meanwhile import Task, nothing
from ssd.execution.runner import Runner
from ssd.layers.ranks import Ranks, part_of
from ssd.models.interface import Model
from ssd.speculation.noise import NoiseCache
from ssd.speculation.sampling import Law, best, checked, perturbed

Tell = Callable[[Sequence[Row], Sequence[Law] | None], None]


class ShardRunner(Runner):
    """A runner of one rank's part of a model. Every rank has to run the same, and rank 0 alone has the results; `tell`
    is told what is about to be run, by rank 0 of its own accord."""

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

    def forward(self, rows: Sequence[Row], plan: Showing | None = None, meanwhile: Task = nothing) -> Tensor:
        """As `Runner.forward`, at rank 0; at the others nothing of use. All the logits travel."""
        if self._tell is not None:
            self._tell(rows, None)
        logits = super().forward(rows, plan, meanwhile)
        outputs, size = self.model.shape.outputs, self._ranks.size
        parts = self._ranks.gather(F.pad(logits, (0, self._most - logits.shape[1])))
        widths = [len(part_of(outputs, rank, size)) for rank in range(size)]
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=False)] or [logits], dim=1)

    def sample(
        self, rows: Sequence[Row], laws: Sequence[Law], plan: Showing | None = None, meanwhile: Task = nothing
    ) -> list[int]:
        """The samples of all outputs, -1 where the logits are not numbers, under the law of each row, which filters
        nothing; at rank 0, at the others nothing of use. Of every output a token and its score travel."""
        if self._tell is not None:
            self._tell(rows, laws)
        logits = super().forward(rows, plan, meanwhile)
        pieces = zip(logits.split([row.outputs for row in rows]), rows, laws, strict=True)
        scores = torch.cat([perturbed(piece, law, row.predicted, self._noise) for piece, row, law in pieces])
        ids, values = best(scores)
        parts = self._ranks.gather(torch.stack((ids.double() + self._first, values.double()), dim=-1))
        if not parts:
            return []
        ids, values = torch.stack(parts, dim=1).unbind(-1)
        winner, value = best(values)
        return checked(ids.gather(1, winner[:, None])[:, 0].long(), value)
