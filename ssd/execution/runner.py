"""Runs a model over ragged batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from importlib.util import find_spec
from typing import TypeVar

import torch
from torch import Tensor

from ssd.errors import SsdError, UsageError
from ssd.execution.batch import FINAL, BaseContext, Row, output_indices
from ssd.execution.kv_cache import KVCache
from ssd.execution.meanwhile import Task, nothing
from ssd.execution.paged import PagedContext
from ssd.execution.states import ROOM_FOR_ONE, StateCache, StateRoom
from ssd.execution.tables import TableContext, table_context
from ssd.kernels import cpu
from ssd.law import Law
from ssd.layers.paged import PagedAttention, TorchAttention
from ssd.models.interface import ForwardContext, Model
from ssd.speculation.adjustment import Text

Result = TypeVar("Result")


def device_of(name: str) -> torch.device:
    """Return a torch device, a GPU with its number. Raises `UsageError` if there is none."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"unknown device {name!r} (cpu, cuda, cuda:N)") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {name}: torch finds no GPU on this machine")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def attention_backend(name: str, device: torch.device, page_size: int, deterministic: bool = False) -> PagedAttention:
    """Make the backend of a name; `deterministic`: no result depends on the batch's shape.

    Raises `UsageError` if it is not installed, or cannot serve this page size or mode."""
    if name == "auto":
        name = "triton" if device.type == "cuda" and find_spec("triton") is not None else "torch"
    if name == "torch":
        return TorchAttention()
    try:
        if name == "triton":
            from ssd.layers.triton_attention import TritonAttention

            return TritonAttention(device, deterministic)
        from ssd.layers.flash_attention import FlashAttention

        return FlashAttention(device, page_size, deterministic)
    except ImportError as error:
        raise UsageError(f"--attention {name} is not installed: {error}") from None


class Runner:
    """Owns a model and its KV cache of `num_pages` pages; `attention` is the name of a backend.

    Keys and values in 8 bits are read only by attention over page tables (fp8) or our kernel (int8). `overlaps`:
    forwards run their `meanwhile` task while the device computes; otherwise afterwards."""

    def __init__(
        self,
        model: Model,
        num_pages: int,
        page_size: int,
        deterministic: bool = False,
        attention: str = "auto",
        *,
        cache_dtype: str = "auto",
        state_room: StateRoom = ROOM_FOR_ONE,
    ) -> None:
        if model.device.type == "cuda":
            torch.cuda.set_device(model.device)  # kernels that are not torch's are launched there
        self.model, self.overlaps = model, model.device.type == "cuda"
        if cache_dtype == "int8" and not (model.dtype == torch.float32 and cpu.present(model.device)):
            raise UsageError(
                "a KV cache in int8 needs our kernels, for a model in float32 on a CPU; they are missing where "
                "SSD_KERNELS is 0, or where neither the package brings them nor a C compiler makes them"
            )
        self._deterministic = deterministic
        self.attention = attention_backend(attention, model.device, page_size, deterministic)
        try:
            stored = {"fp8": torch.uint8, "int8": torch.int8}.get(cache_dtype, model.dtype)
            self.cache = KVCache(model.shape, num_pages, page_size, stored, model.device)
        except RuntimeError as error:
            raise SsdError(f"no room for the KV cache of {num_pages} pages of {page_size} tokens: {error}") from None
        sizes = model.shape.states
        self.state_cache = StateCache(sizes, *state_room, device=model.device) if sizes else None

    @property
    def state_slots(self) -> Sequence[int] | None:
        """Return the slots for states at page boundaries; None without states."""
        if self.state_cache is None:
            return None
        return range(0) if self.model.shape.no_rollback else self.state_cache.saved

    @property
    def paged(self) -> PagedAttention | None:
        """Return the backend that reads page tables; None: `ssd.execution.paged` attends."""
        stored = self.cache.keys.dtype
        plain = stored != torch.uint8 and isinstance(self.attention, TorchAttention)
        return None if plain or stored == torch.int8 else self.attention

    @property
    def table_pages(self) -> int:
        """Return the most pages of a sequence."""
        return -(-self.model.shape.max_position // self.cache.page_size)

    def forward(self, rows: Sequence[Row], context: BaseContext | None = None, meanwhile: Task = nothing) -> Tensor:
        """Run the rows; return the logits [sum of `outputs`, vocabulary], row after row.

        `context`: that of `prepare` for the same rows."""
        token_ids = [token for row in rows for token in row.token_ids]
        assert context is None or isinstance(context, PagedContext | TableContext), "a context of this runner"
        return self.run(token_ids, context or self.context(rows), output_indices(rows), meanwhile)

    def sample(
        self,
        rows: Sequence[Row],
        laws: Sequence[Law],
        context: BaseContext | None = None,
        meanwhile: Task = nothing,
        texts: Sequence[Text | None] = (),
    ) -> list[int] | None:
        """Run the rows and sample all outputs by the law of each row; -1 for NaN logits.

        `texts`: of each row whose logits are adjusted, None for others; may be empty. Returns None, with nothing run,
        if this runner cannot sample so."""
        return None

    def prepare(self, rows: Sequence[Row], layers: Collection[int] = ()) -> BaseContext:
        """Make the context for a forward that keeps hidden states after `layers`, or `FINAL`."""
        return self.context(rows, layers)

    def context(self, rows: Sequence[Row], layers: Collection[int] = ()) -> PagedContext | TableContext:
        """Make the context for an unpadded forward of the rows."""
        context: PagedContext | TableContext
        if self.paged is None:
            context = PagedContext(rows, self.cache, self._deterministic, layers)
        else:
            context = table_context(rows, self.cache, self.paged, self.table_pages, layers)
        context.states = None if self.state_cache is None else self.state_cache.batch(rows)
        return context

    @torch.inference_mode()
    def run(
        self, token_ids: Sequence[int], context: ForwardContext, wanted: Sequence[int], meanwhile: Task = nothing
    ) -> Tensor:
        """Return the logits [len(wanted), outputs] at the batch indices `wanted`."""

        def logits() -> Tensor:
            hidden = self.states(token_ids, context, wanted)
            return self.model.logits(hidden) if wanted else hidden.new_empty(0, self.model.shape.outputs)

        return self.compute(len(token_ids), logits, meanwhile)

    def compute(self, tokens: int, forward: Callable[[], Result], meanwhile: Task = nothing) -> Result:
        """Run `forward`, then `meanwhile`. Every forward passes through here."""
        result = forward()
        meanwhile()
        return result

    @torch.inference_mode()
    def states(self, token_ids: Sequence[int], context: ForwardContext, wanted: Sequence[int]) -> Tensor:
        """Return the hidden states [len(wanted), width] at the batch indices `wanted`."""
        ids, index = torch.tensor(token_ids, device=self.model.device), None
        if len(wanted) < len(token_ids):  # a copy sent after the launches would wait for them
            index = torch.tensor(wanted, dtype=torch.long, device=self.model.device)
        hidden = self.model.forward(ids, context)
        context.keep_hidden(FINAL, hidden)
        return hidden if index is None else hidden[index]

    def warm_up(self, rows: int) -> None:
        """Run batches of one and of `rows` tokens, so that every kernel is ready."""
        for count in (1, min(rows, self.model.shape.max_position)):
            self.attention.warms_up = count == 1
            self.forward([Row([0] * count, 0, range(self.cache.pages), count)])
        self.attention.warms_up = False
