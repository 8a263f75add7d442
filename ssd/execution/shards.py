"""Runs one rank's part of a model, in step with the others (tensor parallelism)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.execution.batch import BaseContext, Row
from ssd.execution.meanwhile import Task, nothing
from ssd.execution.runner import Runner
from ssd.execution.static import StaticContext, StaticRunner
from ssd.law import Law
from ssd.layers.ranks import Ranks, part_of
from ssd.models.interface import Model
from ssd.speculation.adjustment import Text
from ssd.speculation.noise import NoiseCache
from ssd.speculation.sampling import Draws, best, perturbed, read_ids, sound, warmed

Tell = Callable[[Sequence[Row], Sequence[Law] | None], None]


class VocabularyPart:
    """One rank's part of `outputs` ids, and operations over all parts."""

    def __init__(self, outputs: int, ranks: Ranks) -> None:
        self.own = ranks.part(outputs)
        self._outputs, self._ranks = outputs, ranks

    def logits(self, own: Tensor) -> Tensor:
        """Send all ranks' logits to rank 0: [n, outputs] there, undefined elsewhere."""
        outputs, size = self._outputs, self._ranks.size
        parts = self._ranks.gather(F.pad(own, (0, -(-outputs // size) - own.shape[1])))
        widths = [len(part_of(outputs, rank, size)) for rank in range(size)]
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=False)] or [own], dim=1)

    def best(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return `ssd.speculation.sampling.best` of all ranks' scores [n, part] side by side."""
        ids, values = best(scores)
        parts = self._ranks.all(torch.stack((ids.double() + self.own.start, values.double()), dim=-1))
        ids, values = parts.transpose(0, 1).unbind(-1)
        winner, value = best(values)
        return ids.gather(1, winner[:, None])[:, 0].long(), value


class _Shard(Runner):
    """Base of a rank's runners: tells the other ranks of each forward, and gathers logits at rank 0.

    In a class's bases it comes before the runner that computes."""

    def __init__(self, model: Model, *sizes: Any, ranks: Ranks, tell: Tell | None = None, **fields: Any) -> None:
        super().__init__(model, *sizes, **fields)
        self._tell, self._vocabulary = tell, VocabularyPart(model.shape.outputs, ranks)

    def forward(self, rows: Sequence[Row], context: BaseContext | None = None, meanwhile: Task = nothing) -> Tensor:
        """Return at rank 0 the result of `Runner.forward`; undefined elsewhere."""
        if self._tell is not None:
            self._tell(rows, None)
        return self._vocabulary.logits(super().forward(rows, context, meanwhile))

    def _samples(self, rows: Sequence[Row], laws: Sequence[Law], texts: Sequence[Text | None]) -> bool:
        if any(law.filters for law in laws) or any(texts):  # a filter needs all logits, and no rank adjusts
            return False
        if self._tell is not None:
            self._tell(rows, laws)
        return True


class ShardRunner(_Shard):
    """A runner of one rank's part of a model. All ranks run the batches that rank 0 tells them."""

    def __init__(self, model: Model, *sizes: Any, ranks: Ranks, tell: Tell | None = None, **fields: Any) -> None:
        super().__init__(model, *sizes, ranks=ranks, tell=tell, **fields)
        ids = self._vocabulary.own
        self._noise = NoiseCache(len(ids), model.device, first=ids.start)

    def sample(
        self,
        rows: Sequence[Row],
        laws: Sequence[Law],
        context: BaseContext | None = None,
        meanwhile: Task = nothing,
        texts: Sequence[Text | None] = (),
    ) -> list[int] | None:
        """Sample as `Runner.sample`, but return None for filters and adjusted rows."""
        if not self._samples(rows, laws, texts):
            return None
        logits = Runner.forward(self, rows, context, meanwhile)  # this rank's part
        by_row = zip(logits.split([row.outputs for row in rows]), rows, laws, strict=True)
        scores = torch.cat([perturbed(part, law, row.predicted, self._noise) for part, row, law in by_row])
        return read_ids(sound(*self._vocabulary.best(scores)), self.model.shape.vocab_size)


class StaticShardRunner(_Shard, StaticRunner):
    """A `ShardRunner` whose verifications have graph shapes, collectives and draws included.

    Ranks warm up by themselves: they capture the same graphs in the same order."""

    def __init__(self, model: Model, *sizes: Any, ranks: Ranks, tell: Tell | None = None, **fields: Any) -> None:
        super().__init__(model, *sizes, ranks=ranks, tell=tell, **fields)
        self._ids = torch.tensor(self._vocabulary.own, device=model.device)

    def _adjustments(self, sequences: int) -> None:
        return None

    def tokens(self, logits: Tensor, draws: Draws | None = None) -> Tensor:
        return sound(*self._vocabulary.best(warmed(logits, draws, self._ids)))

    def _serves(
        self, rows: Sequence[Row], laws: Sequence[Law], texts: Sequence[Text | None], context: StaticContext
    ) -> bool:
        return self._samples(rows, laws, texts)

    def warm_up(self, rows: int) -> None:
        tell, self._tell = self._tell, None
        super().warm_up(rows)
        self._tell = tell
