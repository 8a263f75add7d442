"""A draft in the target's process and stream, for mode `sd` on one GPU: no message, no board.

The device goes from an outcome to the next batch by itself: it finds the outcome, runs the draft for K tokens with the
target's noise, and builds the batch. A wrong or missing draft token costs a forward, never an id."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ssd.config.engine import EngineConfig
from ssd.config.params import Mode
from ssd.execution.batch import Row
from ssd.execution.graph_shapes import LONGEST_ROW, GraphShape
from ssd.execution.graphs import GraphPool, once
from ssd.execution.pages import OutOfPages, PagePool, PageTable
from ssd.execution.static import StaticForward, StaticRunner
from ssd.kernels.gpu import Draws
from ssd.kernels.rounds import RowLayout, begin_draft, go_on_drafting
from ssd.models.interface import Model
from ssd.speculation.sampling import Drawing, best, drawn, sound, warmed
from ssd.system import failpoints
from ssd.verifier.sequence import Sequence as Request

log = logging.getLogger("ssd.target")

INLINE_MODES: tuple[Mode, ...] = ("sd", "auto")
"""Modes that such a draft serves. `auto` is `sd` where no process drafts beside it."""

# Seconds for which a draft is left alone after an error.
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 64.0
_DRAWINGS = Drawing.GREEDY, Drawing.WARM, Drawing.FILTERED


def _size(rows: int) -> int:
    return 1 << (rows - 1).bit_length()


class InlineRunner(StaticRunner):
    """The draft's runner; it draws ids of the target's vocabulary, or of its list."""

    def __init__(self, model: Model, config: EngineConfig) -> None:
        self.pages = config.inline_num_pages or config.draft_num_pages
        sizes = self.pages, config.page_size, config.deterministic, config.attention
        self._outputs = min(config.vocab_size, model.shape.outputs)
        self._ids: Tensor | None = getattr(getattr(model, "head", None), "ids", None)
        capture = not config.enforce_eager
        super().__init__(model, *sizes, most_rows=config.max_num_seqs, longest=2, capture=capture)

    def _adjustments(self, sequences: int) -> None:
        return None  # a draft guesses by its own logits

    def tokens(self, logits: Tensor, draws: Draws | None = None) -> Tensor:
        logits = logits[:, : self._outputs].contiguous()
        if self._ids is None:
            return drawn(logits, draws)
        found = sound(*best(warmed(logits, draws, self._ids)))
        return torch.where(found < 0, found, self._ids[found.clamp(min=0)])


class _Loop:
    """Captured forwards of `rows` rows in one kind of drawing: the `first`, then `one` or the `rest`."""

    def __init__(self, draft: InlineDraft, rows: int, drawing: Drawing) -> None:
        self._draft, self._rows, self._drawing = draft, rows, drawing
        # A row's first forward may have two tokens: the last draft token was accepted, but never read.
        self._two = StaticForward(draft.runner, GraphShape(rows, 2 * rows, 2), ())
        self._one = StaticForward(draft.runner, GraphShape(rows, rows, 1), ())
        self.first: Callable[[], None] = self._begin
        self.one: Callable[[], None] = partial(self._forward, self._one)
        self.rest: Callable[[], None] = self._go_on

    def _begin(self) -> None:
        draft = self._draft
        begin_draft(draft.rows, draft.decided(), draft.drafted, draft.work, draft.known, draft.layout)
        self._forward(self._two)

    def _go_on(self) -> None:
        for _ in range(self._draft.lookahead - 1):
            self._forward(self._one)

    def _forward(self, step: StaticForward) -> None:
        draft, rows, starts = self._draft, self._rows, step.batch.fields["starts"]
        work = draft.work[:rows]
        step.follow(draft.rows[:rows], work, draft.layout)
        go_on_drafting(draft.drafted[:rows], work, step.sampled(self._drawing), starts, draft.vocabulary)


class _DraftedText:
    """A request's text as the draft has read it: `computed` tokens; `full`: it had no room."""

    def __init__(self, table: PageTable, tokens: Sequence[int]) -> None:
        self.table, self.full = table, False
        self.computed = table.adopt_prefix(tokens)

    def share(self, tokens: Sequence[int]) -> None:
        self.table.share_computed(tokens, min(self.computed, len(tokens) - 1))


class InlineDraft:
    """Owns the draft's model, its KV cache and what it has read of each request.

    `drafted` int64 [rows, 3 + most]: results of `run` (`ssd.kernels.rounds.begin_draft`). After an error it rests."""

    def __init__(self, config: EngineConfig, runner: InlineRunner) -> None:
        self.runner, self.vocabulary, self.known = runner, config.vocab_size, runner.model.shape.vocab_size
        self.lookahead = min(config.speculation.num_speculative_tokens, LONGEST_ROW - 1)
        self.steps, self._pause, self._again = 0, _PAUSE_S, 0.0
        self._pool = PagePool(runner.pages, config.page_size)
        self._texts: dict[int, _DraftedText] = {}
        self._most_tokens = config.max_num_batched_tokens
        self._loops: dict[tuple[int, Drawing], _Loop] = {}

    @torch.inference_mode()
    def prepare(self, rows: Tensor, decided: Callable[[], Tensor], layout: RowLayout) -> None:
        """Make, and on a GPU capture, forwards that read a scheduler's `rows` and what it `decided`."""
        self.rows, self.decided, self.layout = rows, decided, layout
        self.drafted, self.work = torch.zeros_like(decided()), torch.zeros_like(decided())
        captured = GraphPool(self.runner.model.device).capture if self.runner.capture else once
        size = _size(len(rows))
        while size:  # the largest first: smaller ones reuse its memory
            for drawing in _DRAWINGS:
                loop = self._loops[size, drawing] = _Loop(self, min(size, len(rows)), drawing)
                loop.first, loop.one = captured(loop.first), captured(loop.one)
                loop.rest = captured(loop.rest) if self.lookahead > 2 else loop.one
            size //= 2

    @property
    def failed(self) -> bool:
        return time.monotonic() < self._again

    @torch.inference_mode()
    def forwards(self) -> dict[int, Callable[[], None]]:
        """Return a later forward of each size of a batch, without rows, to be timed."""
        self.work[:, 2] = -1
        return {rows: loop.one for (rows, drawing), loop in self._loops.items() if drawing is Drawing.GREEDY}

    # -- texts -----------------------------------------------------------------------------------------------------

    def read(self, requests: Sequence[Request]) -> list[Request]:
        """Read the new tokens of texts but the last one of each; return the requests read to the end.

        Prompts are read in parts of at most `max_num_batched_tokens` tokens in all."""
        rows, ready, room = list[Row](), list[Request](), self._most_tokens
        for request in requests:
            text = self._texts.get(request.request)
            if text is None:
                table = PageTable(self._pool, request.params.cache_salt)
                text = self._texts[request.request] = _DraftedText(table, request.tokens)
            missing = request.tokens[text.computed : len(request.tokens) - 1][:room]
            stop = text.computed + len(missing)
            if not self._grown(text, stop):
                continue
            missing = [token if token < self.known else 0 for token in missing]
            if missing:
                rows.append(Row(missing, text.computed, text.table.pages, 0, request.slot))
                room, text.computed = room - len(missing), stop
            if stop == len(request.tokens) - 1:
                ready.append(request)
        if rows:
            failpoints.reach("draft.prefill")
            self.runner.forward(rows)
        for request in requests:
            self._texts[request.request].share(request.tokens)
        return ready

    def has_read(self, request: Request) -> bool:
        """Return True if the draft has read all but what verifying the request's proposal may add."""
        text = self._texts.get(request.request)
        return text is not None and text.computed >= len(request.tokens) - 1 + max(1, len(request.proposal))

    def is_full(self, request: Request) -> bool:
        text = self._texts.get(request.request)
        return text is not None and text.full

    def makes_room(self, request: Request, stop: int) -> bool:
        """Return True if there are pages for `stop` tokens of a text; else give its pages back."""
        return self._grown(self._texts[request.request], stop)

    def _grown(self, text: _DraftedText, stop: int) -> bool:
        text.full = stop > self.runner.model.shape.max_position
        try:
            text.table.grow(0 if text.full else stop)
        except OutOfPages:
            text.full = True
        if text.full:
            text.table.free()
            text.computed = 0
        return not text.full

    def committed(self, request: Request, drafted: int) -> None:
        """Note a request's new tokens; where the device drafts ahead, `drafted` tokens follow."""
        text = self._texts.get(request.request)
        if text is not None and not text.full:
            known = len(request.tokens) - 1
            text.computed = known + drafted if drafted else min(text.computed, known)

    def release(self, requests: Sequence[Request]) -> None:
        for request in requests:
            text = self._texts.pop(request.request, None)
            if text is not None:
                text.share(request.tokens)
                text.table.free()

    # -- the device's work -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, rows: Sequence[tuple[int, int]], most: int, drawing: Drawing) -> None:
        """Launch the forwards of up to `most` draft tokens for rows of (slot, request)."""
        known = [(slot, text.table.pages) for slot, request in rows if (text := self._texts.get(request)) is not None]
        if most and not self.failed:
            try:
                self.runner.tables.tell(known)
                self._launch(self._loops[_size(len(rows)), min(drawing, Drawing.FILTERED)], most)
                return
            except Exception:
                self.fail()
        self.drafted.copy_(self.decided())
        self.drafted[:, 2].zero_()  # no draft tokens

    def fail(self) -> None:
        """Log the present exception, forget all texts, rest twice as long as last time."""
        log.exception("the draft failed; decoding goes on without it for %.0f s", self._pause)
        self._again, self._pause = time.monotonic() + self._pause, min(2 * self._pause, _LONGEST_PAUSE_S)
        for text in self._texts.values():
            text.table.free()
        self._texts.clear()

    def _launch(self, loop: _Loop, most: int) -> None:
        loop.first()
        if most == self.lookahead > 1:
            loop.rest()
        else:
            for _ in range(most - 1):
                loop.one()
        self.steps += most
