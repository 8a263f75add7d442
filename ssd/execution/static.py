"""Verification in batches of a few fixed shapes, so that on a GPU a whole forward is one launch (a CUDA graph).

A shape has room for some rows and tokens (`ssd.execution.rooms`). A batch takes the smallest that holds it; what is
left over is filled with a dummy sequence. What fits no shape, prompts above all, runs as it is; but if deterministic
there is a single shape, and everything is cut into pieces of it. But for the recording all of this runs on a CPU too.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence

import torch
from torch import Tensor

from ssd.execution.batch import Row, Showing, output_indices
from ssd.execution.graphs import Recorder, once
from ssd.execution.meanwhile import Once, Task, nothing
from ssd.execution.rooms import MOST_TOKENS, Room, fitting, rooms_of_target
from ssd.execution.runner import Runner
from ssd.execution.tables import BatchTensors, Draw, Tables
from ssd.models.interface import Model
from ssd.speculation.noise import gumbels_of
from ssd.speculation.sampling import Law, best, drawn, sound


def pieces(rows: Sequence[Row], room: Room) -> Iterator[list[tuple[int, Row]]]:
    """The rows cut so that each part fits the room, in order; of each piece also the number of the row it is of."""
    part: list[tuple[int, Row]] = []
    left = room.tokens
    for number, row in enumerate(rows):
        begun, first_output = 0, len(row.token_ids) - row.outputs
        while begun < len(row.token_ids):
            if not left or len(part) == room.rows:
                yield part
                part, left = [], room.tokens
            stop = min(len(row.token_ids), begun + min(left, room.longest))
            outputs = max(0, stop - max(begun, first_output))
            part.append((number, Row(row.token_ids[begun:stop], row.start + begun, row.pages, outputs, row.slot)))
            left -= stop - begun
            begun = stop
    if part:
        yield part


class StaticPlan(Showing):
    """Rows that will run in static shapes."""

    def __init__(self, layers: Container[int], parts: list[tuple[Step, list[tuple[int, Row]]]]) -> None:
        super().__init__(layers)
        self.parts = parts

    def keep(self, shown: dict[int, Tensor], tokens: int) -> None:
        """The next part's hidden states, of which the first `tokens` are of worth."""
        for layer, states in shown.items():
            before = [self.shown[layer]] if layer in self.shown else []
            self.show(layer, torch.cat([*before, states[:tokens]]))


class Step:
    """A forward in one shape, and what it leaves: logits [tokens, outputs], the greedy tokens int64 [tokens], the
    hidden states after some layers; and, from these logits, drawn tokens."""

    def __init__(self, runner: StaticRunner, room: Room, layers: Container[int]) -> None:
        self._runner, self._layers, self.room = runner, layers, room
        self.batch = BatchTensors(*room.sizes, runner.model.device)
        self.logits = self.greedy = self.drawn = torch.empty(0)
        self.shown: dict[int, Tensor] = {}
        self.run: Callable[[], None] = self._forward
        self.draw: Callable[[], None] = self._draw

    def _forward(self) -> None:
        runner = self._runner
        plan = self.batch.plan(runner.tables.tensor, runner.cache, runner.attention, self._layers)
        self.logits = runner.model.logits(runner.model.forward(self.batch.ids, plan))
        self.greedy = sound(*best(self.logits.float()))
        self.shown = plan.shown

    def tokens(self, greedy: bool) -> Tensor:
        """int64 [tokens]: what follows each token of the forward that was run last, drawn if not `greedy`."""
        if not greedy:
            self.draw()
        return self.greedy if greedy else self.drawn

    def _draw(self) -> None:
        keys, inverse = self.batch.draws
        self.drawn = drawn(self.logits, inverse, gumbels_of(keys, self.logits.shape[1]))


class StaticRunner(Runner):
    """A runner whose verifications of up to `most_rows` rows of up to `longest` tokens have static shapes, recorded
    where `capture` and there is a GPU. `layers` are those whose hidden states it may be asked for.

    Rows have slots below `most_rows`, those of different sequences different ones. The logits of a forward are
    overwritten by the next.
    """

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
        layers: Container[int] = (),
        capture: bool = True,
    ) -> None:
        super().__init__(model, num_pages + 1, page_size, deterministic, attention)  # the last one is the dummy's
        self.tables = Tables(most_rows, self.table_pages, num_pages, model.device)
        self.capture = capture and model.device.type == "cuda"
        self.steps = {room: Step(self, room, layers) for room in rooms_of_target(most_rows, longest, deterministic)}

    def prepare(self, rows: Sequence[Row], layers: Container[int] = ()) -> Showing:
        found = list(self.steps)
        if self._deterministic:
            return StaticPlan(layers, [(self.steps[found[0]], part) for part in pieces(rows, found[0])])
        room = fitting([len(row.token_ids) for row in rows], found)
        if room is None:
            return super().prepare(rows, layers)
        return StaticPlan(layers, [(self.steps[room], list(enumerate(rows)))])

    @torch.inference_mode()
    def forward(self, rows: Sequence[Row], plan: Showing | None = None, meanwhile: Task = nothing) -> Tensor:
        plan = plan or self.prepare(rows)
        if not isinstance(plan, StaticPlan):
            return super().forward(rows, plan, meanwhile)
        alone = len(plan.parts) == 1
        found = [step.logits[wanted] if alone else step.logits[wanted].clone() for step, wanted in self._run(plan)]
        meanwhile()
        return found[0] if alone else torch.cat(found)

    @torch.inference_mode()
    def sample(
        self, rows: Sequence[Row], laws: Sequence[Law], plan: Showing | None = None, meanwhile: Task = nothing
    ) -> list[int] | None:
        plan = plan or self.prepare(rows)
        if not isinstance(plan, StaticPlan):
            return None
        greedy = all(law.temperature == 0.0 for law in laws)
        tokens: list[int] = []
        meanwhile = Once(meanwhile)
        for step, wanted in self._run(plan, () if greedy else laws):
            found = step.tokens(greedy)
            meanwhile()
            tokens += found[wanted].tolist()
        return tokens

    @torch.inference_mode()
    def launch(self, rows: Sequence[Row], laws: Sequence[Law]) -> Tensor | None:
        """The samples of all tokens of a verification, as they will be once it has run; None where it has not one
        static shape. The next forward overwrites them."""
        plan = self.prepare(rows)
        if not isinstance(plan, StaticPlan) or len(plan.parts) > 1:
            return None
        greedy = all(law.temperature == 0.0 for law in laws)
        ((step, _),) = self._run(plan, () if greedy else laws)
        return step.tokens(greedy)

    def _run(self, plan: StaticPlan, laws: Sequence[Law] = ()) -> Iterator[tuple[Step, slice | Tensor]]:
        """Run the parts of a plan, one after the other: the step after each, and where in it the wanted outputs lie."""
        for step, part in plan.parts:
            rows = [row for _, row in part]
            self.tables.tell((row.slot, row.pages[: -(-row.stop // self.cache.page_size)]) for row in rows)
            drawing = [draw for number, row in part for draw in draws_of(row, laws[number])] if laws else ()
            tokens, wanted = sum(len(row.token_ids) for row in rows), output_indices(rows)
            where: slice | Tensor = slice(0, tokens)
            if len(wanted) < tokens:  # sent before the launch: afterwards sending would wait for it
                where = torch.tensor(wanted, dtype=torch.long, device=self.model.device)
            self._fill(step, rows, drawing)
            step.run()
            plan.keep(step.shown, tokens)
            yield step, where

    def _fill(self, step: Step, rows: Sequence[Row], draws: Sequence[Draw] = ()) -> None:
        dummy = self.tables.dummy, self.tables.dummy_page
        step.batch.fill(rows, [row.slot for row in rows], self.cache, *dummy, draws)

    @torch.inference_mode()
    def warm_up(self, rows: int) -> None:
        """Run, and record, every static shape; and a forward that has none."""
        record = Recorder(self.model.device).record if self.capture else once
        super().warm_up(rows)
        prompt = min(MOST_TOKENS, self.model.shape.max_position, self.tables.dummy_page * self.cache.page_size)
        self.forward([Row([0] * prompt, 0, range(self.table_pages))])
        # The largest first: the smaller ones find room in its memory.
        for step in sorted(self.steps.values(), key=lambda step: -step.batch.tokens):
            self._fill(step, [])
            step.run, step.draw = record(step.run), record(step.draw)


def draws_of(row: Row, law: Law) -> list[Draw]:
    """What decides the token after each token of a row."""
    return [Draw.of(law, position) for position in range(row.start + 1, row.stop + 1)]
