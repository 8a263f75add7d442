"""The target's verifications in padded graph shapes: on a GPU a forward is one launch.

A batch takes the smallest shape that holds it, padded with a dummy sequence, or else runs unpadded. A deterministic
engine cuts every batch into chunks of its one shape. On a CPU nothing is captured."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from ssd.execution.adjustments import AdjustmentTable
from ssd.execution.batch import FINAL, BaseContext, Row, output_indices
from ssd.execution.graph_shapes import MOST_TOKENS, GraphShape, smallest_fitting, target_shapes
from ssd.execution.graphs import GraphPool, once
from ssd.execution.meanwhile import Once, Task, nothing
from ssd.execution.runner import Runner
from ssd.execution.tables import BatchTensors, Draw, Tables
from ssd.kernels.gpu import fuses
from ssd.kernels.rounds import RowLayout, build
from ssd.law import Law
from ssd.models.interface import Model
from ssd.speculation.adjustment import Text
from ssd.speculation.sampling import Drawing, Draws, drawing_of, drawn, read_ids


def prefill_chunks(rows: Sequence[Row], shape: GraphShape) -> Iterator[list[tuple[int, Row]]]:
    """Cut the rows into batches that fit the shape: lists of (index of the row, chunk of it)."""
    part: list[tuple[int, Row]] = []
    left = shape.tokens
    for number, row in enumerate(rows):
        begun, first_output = 0, len(row.token_ids) - row.outputs
        while begun < len(row.token_ids):
            if not left or len(part) == shape.rows:
                yield part
                part, left = [], shape.tokens
            stop = min(len(row.token_ids), begun + min(left, shape.longest))
            outputs = max(0, stop - max(begun, first_output))
            part.append((number, Row(row.token_ids[begun:stop], row.start + begun, row.pages, outputs, row.slot)))
            left -= stop - begun
            begun = stop
    if part:
        yield part


class StaticContext(BaseContext):
    """Owns the rows of a forward as (step, chunks) in order, and collects their hidden states.

    States of a single step are its own tensors, which the next forward overwrites."""

    def __init__(self, layers: Collection[int], parts: list[tuple[StaticForward, list[tuple[int, Row]]]]) -> None:
        super().__init__(layers)
        self.parts = parts

    def keep(self, hidden: dict[int, Tensor], tokens: int) -> None:
        """Append the hidden states of the next step; rows behind `tokens` are padding."""
        for layer, states in hidden.items():
            own = states[:tokens]
            if len(self.parts) > 1:  # the next step overwrites it
                own = torch.cat([*([self.hidden[layer]] if layer in self.hidden else []), own])
            self.keep_hidden(layer, own)


class StaticForward:
    """The forward in one graph shape, and its results, which the next run overwrites.

    `run` leaves `logits` [tokens, vocabulary], `greedy` int64 [tokens], and `hidden` states after `layers` and `FINAL`.
    Each of `draws` then leaves samples in `drawn` int64 [tokens]."""

    def __init__(self, runner: StaticRunner, shape: GraphShape, layers: Collection[int]) -> None:
        self._runner, self._layers, self.shape = runner, (*layers, FINAL), shape
        self.batch = BatchTensors(*shape.sizes, runner.model.device)
        self.logits = self.greedy = torch.empty(0)
        # One tensor for every draw: a replayed graph writes where it was captured, and sets no attribute.
        self.drawn = torch.zeros(shape.tokens, dtype=torch.int64, device=runner.model.device)
        self.hidden: dict[int, Tensor] = {}
        self.run: Callable[[], None] = self._forward
        drawings = [drawing for drawing in Drawing if drawing < Drawing.ADJUSTED or runner.adjustments is not None]
        self.draws: dict[Drawing, Callable[[], None]] = {
            drawing: partial(self._draw, drawing) for drawing in drawings if drawing
        }

    def _forward(self) -> None:
        self._compute()
        self.greedy = self._runner.tokens(self.logits)

    def _compute(self) -> None:
        runner = self._runner
        context = self.batch.context(runner.tables.tensor, runner.cache, runner.attention, self._layers)
        final = runner.model.forward(self.batch.ids, context)
        context.keep_hidden(FINAL, final)
        self.logits = runner.model.logits(final)
        self.hidden = context.hidden

    def follow(self, rows: Tensor, decided: Tensor, layout: RowLayout) -> None:
        """Write the batch that follows `rows` by what was `decided` (`ssd.kernels.rounds.build`)."""
        tables, batch = self._runner.tables, self.batch
        sizes, dummy = (batch.tokens, batch.rows, batch.longest), (tables.dummy, tables.dummy_page)
        build(rows, decided, tables.tensor, batch.fields, sizes, self._runner.cache.page_size, dummy, layout)

    def tokens(self, drawing: Drawing) -> Tensor:
        """Return the token after each token of the last run, int64 [tokens]."""
        if drawing is Drawing.GREEDY:
            return self.greedy
        self.draws[drawing]()
        return self.drawn

    def sampled(self, drawing: Drawing) -> Tensor:
        """Run within a larger graph; return the token after each token, int64 [tokens].

        Nothing else is left: the graphs of a pool share the memory of the logits."""
        self._compute()
        if drawing is not Drawing.GREEDY:
            self._draw(drawing)
        found = self._runner.tokens(self.logits) if drawing is Drawing.GREEDY else self.drawn
        self.logits, self.hidden = torch.empty(0), {}
        return found

    def _draw(self, drawing: Drawing) -> None:
        logits, table = self.logits, self._runner.adjustments
        if drawing is Drawing.ADJUSTED and table is not None:
            logits = table.adjust(logits, self.batch.fields)
        self.drawn.copy_(self._runner.tokens(logits, self.batch.draws(drawing)))


class StaticRunner(Runner):
    """A runner whose verifications of up to `most_rows` rows of up to `longest` tokens have graph shapes.

    Only hidden states after `layers` can be asked for. Rows have slots below `most_rows`. The next forward overwrites
    the logits. `adjustments` is None where the device adjusts no logits."""

    def __init__(
        self,
        model: Model,
        num_pages: int,
        page_size: int,
        deterministic: bool = False,
        attention: str = "auto",
        *,
        most_rows: int,
        longest: int,
        layers: Collection[int] = (),
        capture: bool = True,
        cache_dtype: str = "auto",
    ) -> None:
        # The last page is the dummy's.
        super().__init__(model, num_pages + 1, page_size, deterministic, attention, cache_dtype=cache_dtype)
        self.tables = Tables(most_rows, self.table_pages, num_pages, model.device)
        self.capture = capture and model.device.type == "cuda"
        self.adjustments = self._adjustments(most_rows)
        self.steps = {
            shape: StaticForward(self, shape, layers) for shape in target_shapes(most_rows, longest, deterministic)
        }

    def _adjustments(self, sequences: int) -> AdjustmentTable | None:
        device = self.model.device
        served = device.type == "cpu" or fuses(device)
        return AdjustmentTable(sequences, self.model.shape.vocab_size, device) if served else None

    def tokens(self, logits: Tensor, draws: Draws | None = None) -> Tensor:
        """Return the likeliest or, with `draws`, drawn tokens, int64 [n], without waiting."""
        return drawn(logits, draws)

    def prepare(self, rows: Sequence[Row], layers: Collection[int] = ()) -> BaseContext:
        found = list(self.steps)
        if self._deterministic:
            return StaticContext(layers, [(self.steps[found[0]], part) for part in prefill_chunks(rows, found[0])])
        shape = smallest_fitting([len(row.token_ids) for row in rows], found)
        if shape is None:
            return super().prepare(rows, layers)
        return StaticContext(layers, [(self.steps[shape], list(enumerate(rows)))])

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row], context: BaseContext | None = None, meanwhile: Task = nothing) -> Tensor:
        context = context or self.prepare(rows)
        if not isinstance(context, StaticContext):
            return super().forward(rows, context, meanwhile)
        alone = len(context.parts) == 1
        found = [step.logits[wanted] if alone else step.logits[wanted].clone() for step, wanted in self._run(context)]
        meanwhile()
        return found[0] if alone else torch.cat(found)

    @torch.inference_mode()
    def sample(
        self,
        rows: Sequence[Row],
        laws: Sequence[Law],
        context: BaseContext | None = None,
        meanwhile: Task = nothing,
        texts: Sequence[Text | None] = (),
    ) -> list[int] | None:
        context = context or self.prepare(rows)
        if not isinstance(context, StaticContext) or not self._serves(rows, laws, texts, context):
            return None
        drawing = drawing_of(laws, any(texts))
        tokens: list[int] = []
        meanwhile = Once(meanwhile)
        for step, wanted in self._run(context, laws if drawing else ()):
            found = step.tokens(drawing)
            meanwhile()
            tokens += read_ids(found[wanted], self.model.shape.vocab_size)
        return tokens

    @torch.inference_mode()
    def launch(self, rows: Sequence[Row], laws: Sequence[Law], texts: Sequence[Text | None] = ()) -> Tensor | None:
        """Start a verification; return the tensor int64 [tokens] that its samples will be in.

        Returns None if it does not fit one graph shape. The next forward overwrites the tensor."""
        context = self.prepare(rows)
        if not isinstance(context, StaticContext) or len(context.parts) > 1:
            return None
        if not self._serves(rows, laws, texts, context):
            return None
        drawing = drawing_of(laws, any(texts))
        ((step, _),) = self._run(context, laws if drawing else ())
        return step.tokens(drawing)

    def _serves(
        self, rows: Sequence[Row], laws: Sequence[Law], texts: Sequence[Text | None], context: StaticContext
    ) -> bool:
        """Tell the device the adjustments of the logits; return False if it cannot make them.

        It cannot for a row of a prompt (several committed tokens), nor for rows in several parts."""
        if not any(texts):
            return True
        whole = all(text is None or row.outputs == len(row.token_ids) for row, text in zip(rows, texts, strict=True))
        if self.adjustments is None or len(context.parts) > 1 or not whole:
            return False
        self.adjustments.tell((row.slot, text) for row, text in zip(rows, texts, strict=True))
        return True

    def _run(self, context: StaticContext, laws: Sequence[Law] = ()) -> Iterator[tuple[StaticForward, slice | Tensor]]:
        """Launch the steps of a batch in order; yield each with its wanted indices."""
        for step, part in context.parts:
            rows = [row for _, row in part]
            self.tables.tell((row.slot, row.pages[: -(-row.stop // self.cache.page_size)]) for row in rows)
            drawing = [draw for number, row in part for draw in draws_of(row, laws[number])] if laws else ()
            tokens, wanted = sum(len(row.token_ids) for row in rows), output_indices(rows)
            where: slice | Tensor = slice(0, tokens)
            if len(wanted) < tokens:  # a copy sent after the launch would wait for it
                where = torch.tensor(wanted, dtype=torch.long, device=self.model.device)
            self._fill(step, rows, drawing)
            step.run()
            context.keep(step.hidden, tokens)
            yield step, where

    def _fill(self, step: StaticForward, rows: Sequence[Row], draws: Sequence[Draw] = ()) -> None:
        dummy = self.tables.dummy, self.tables.dummy_page
        step.batch.fill(rows, [row.slot for row in rows], self.cache, *dummy, draws)

    @torch.inference_mode()
    def warm_up(self, rows: int) -> None:
        """Run, and capture, every graph shape; and run an unpadded forward."""
        captured = GraphPool(self.model.device).capture if self.capture else once
        super().warm_up(rows)
        prompt = min(MOST_TOKENS, self.model.shape.max_position, self.tables.dummy_page * self.cache.page_size)
        self.forward([Row([0] * prompt, 0, range(self.table_pages))])
        # The largest first: the smaller ones reuse its memory.
        for step in sorted(self.steps.values(), key=lambda step: -step.batch.tokens):
            self._fill(step, [])
            step.run = captured(step.run)
            step.draws = {drawing: captured(draw) for drawing, draw in step.draws.items()}


def draws_of(row: Row, law: Law) -> list[Draw]:
    return [Draw.of(law, position) for position in range(row.start + 1, row.stop + 1)]
