"""Runs a model over ragged batches; owns the device, the model and its KV cache."""

from __future__ import annotations

from collections.abc import Container, Sequence

import torch
from torch import Tensor

from ssd.errors import SsdError, UsageError
from ssd.execution.batch import Row, Showing, output_indices
from ssd.execution.kv_cache import KVCache
from ssd.execution.meanwhile import Task, nothing
from ssd.execution.paged import PagedPlan
from ssd.execution.tables import TablePlan, table_plan
from ssd.layers.paged import PagedAttention, TorchAttention, attention_backend
from ssd.models.interface import Model, Plan
from ssd.speculation.sampling import Law


def device_of(name: str) -> torch.device:
    """The torch device of a configured name, a GPU with its number, which torch asks for now and then; raises
    `UsageError` when this machine does not have it."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"unknown device {name!r} (cpu, cuda, cuda:N)") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {name}: torch finds no GPU on this machine")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


class Runner:
    """A model, a paged cache of `num_pages` pages, and the forward over rows. `attention` is the name of a backend.

    `overlaps`: a forward does what it is given to do `meanwhile` while its device computes; otherwise only afterwards.
    """

    def __init__(
        self, model: Model, num_pages: int, page_size: int, deterministic: bool = False, attention: str = "auto"
    ) -> None:
        if model.device.type == "cuda":
            torch.cuda.set_device(model.device)  # where kernels are launched that are not torch's
        self.model, self.overlaps = model, model.device.type == "cuda"
        self._deterministic = deterministic
        self.attention = attention_backend(attention, model.device, page_size, deterministic)
        try:
            self.cache = KVCache(model.shape, num_pages, page_size, model.dtype, model.device)
        except RuntimeError as error:
            raise SsdError(f"no room for the KV cache of {num_pages} pages of {page_size} tokens: {error}") from None

    @property
    def paged(self) -> PagedAttention | None:
        """The backend for batches of any shape; None where torch reads keys row by row, without page tables."""
        return None if isinstance(self.attention, TorchAttention) else self.attention

    @property
    def table_pages(self) -> int:
        """More pages than this no sequence has."""
        return -(-self.model.shape.max_position // self.cache.page_size)

    def forward(self, rows: Sequence[Row], plan: Showing | None = None, meanwhile: Task = nothing) -> Tensor:
        """Logits [sum of the rows' outputs, the model's outputs] of the rows' last tokens, row after row. `plan` is
        what `prepare` gave for the rows, where the caller has asked it to keep something."""
        token_ids = [token for row in rows for token in row.token_ids]
        assert plan is None or isinstance(plan, PagedPlan | TablePlan), "a plan that this runner has made"
        return self.run(token_ids, plan or self.plan(rows), output_indices(rows), meanwhile)

    def sample(
        self, rows: Sequence[Row], laws: Sequence[Law], plan: Showing | None = None, meanwhile: Task = nothing
    ) -> list[int] | None:
        """The samples of all outputs, -1 where the logits are not numbers, under the law of each row, which filters
        nothing; None from a runner that leaves this to who has the logits."""
        return None

    def prepare(self, rows: Sequence[Row], layers: Container[int] = ()) -> Showing:
        """What will keep the hidden states after these `layers` of a forward of the rows."""
        return self.plan(rows, layers)

    def plan(self, rows: Sequence[Row], layers: Container[int] = ()) -> PagedPlan | TablePlan:
        """The plan of rows over this runner's cache, which keeps the hidden states after these `layers`."""
        if self.paged is None:
            return PagedPlan(rows, self.cache, self._deterministic, layers)
        return table_plan(rows, self.cache, self.paged, self.table_pages, layers)

    @torch.inference_mode()
    def run(self, token_ids: Sequence[int], plan: Plan, wanted: Sequence[int], meanwhile: Task = nothing) -> Tensor:
        """Logits [len(wanted), outputs] at the batch indices `wanted` of any plan."""
        logits = self._computed(token_ids, plan, wanted)
        meanwhile()
        return logits

    def _computed(self, token_ids: Sequence[int], plan: Plan, wanted: Sequence[int]) -> Tensor:
        ids, index = torch.tensor(token_ids, device=self.model.device), None
        if len(wanted) < len(token_ids):  # sent before the launches: afterwards sending would wait for them
            index = torch.tensor(wanted, dtype=torch.long, device=self.model.device)
        hidden = self.model.forward(ids, plan)
        if not wanted:
            return hidden.new_empty(0, self.model.shape.outputs)
        return self.model.logits(hidden if index is None else hidden[index])

    def warm_up(self, rows: int) -> None:
        """Run every kernel once over page 0, for batches of one and of `rows` tokens, or as many as there may be."""
        for count in (1, min(rows, self.model.shape.max_position)):
            self.forward([Row([0] * count, 0, range(self.cache.pages), count)])
