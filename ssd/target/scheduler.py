"""Who is in the next batch, with how many tokens (continuous batching, chunked prefill, preemption)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ssd.execution.batch import Row
from ssd.execution.pages import OutOfPages, PagePool
from ssd.target.sequence import Sequence


@dataclass(frozen=True)
class Scheduled:
    """A sequence's part of a step: its row ends with `drafted` draft tokens. A row without outputs is a prefill chunk
    that does not reach the end of the committed tokens."""

    sequence: Sequence
    row: Row
    drafted: int

    def without_draft(self) -> Scheduled:
        """The same part with committed tokens only."""
        row = self.row
        known = row.token_ids[: len(row.token_ids) - self.drafted]
        return Scheduled(self.sequence, Row(known, row.start, row.pages, outputs=1), 0)


class Scheduler:
    """Waiting and running sequences; the rows of one step carry at most `max_tokens` tokens in all.

    Running sequences come first, oldest first, so that a long prompt delays nobody by more than its chunk. A sequence
    that decodes gets its one token even beyond the budget: nobody starves.
    """

    def __init__(self, pool: PagePool, max_sequences: int, max_tokens: int) -> None:
        self._pool, self._max_tokens = pool, max_tokens
        self._free_slots = list(range(max_sequences))[::-1]
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def find(self, request: int) -> Sequence | None:
        return next((s for s in (*self.running, *self.waiting) if s.request == request), None)

    def admit(self) -> list[Sequence]:
        """Move waiting sequences to free slots; returns those that begin, or begin again after a preemption."""
        admitted = []
        while self.waiting and self._free_slots and self._fits(self.waiting[0]):
            sequence = self.waiting.popleft()
            sequence.slot = self._free_slots.pop()
            sequence.computed = sequence.table.adopt_prefix(sequence.tokens)
            if sequence.round == 0:
                sequence.cached = sequence.computed
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def _fits(self, sequence: Sequence) -> bool:
        """Pages for all it has now are available. Alone it may always start: configuration guarantees it can finish."""
        return not self.running or sequence.table.missing(len(sequence.tokens) + 1) <= self._pool.available

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence wherever it is and give its pages back. No step may be in flight."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._vacate(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        sequence.table.free()
        self._free_slots.append(sequence.slot)
        sequence.slot, sequence.computed, sequence.hit = -1, 0, None
        sequence.proposal, sequence.laws = [], None

    def schedule(self) -> tuple[list[Scheduled], list[Sequence]]:
        """The next batch, and the sequences that lost their pages to it: the newest, at the front of the queue with
        their tokens and counters, to be computed again."""
        batch: list[Scheduled] = []
        preempted: list[Sequence] = []
        budget = self._max_tokens
        for sequence in list(self.running):
            if sequence.slot < 0:
                continue  # preempted for an older one, in this loop
            part = self._part(sequence, budget)
            part = part and self._make_room(part, preempted)
            if part is not None:
                batch.append(part)
                budget -= len(part.row.token_ids)
        return batch, preempted

    def _part(self, sequence: Sequence, budget: int) -> Scheduled | None:
        """What `sequence` does with what is left of the budget; None when that is nothing."""
        pending = len(sequence.tokens) - sequence.computed
        if pending > 1 and budget <= 0:
            return None
        chunk = sequence.tokens[sequence.computed : sequence.computed + max(1, budget)]
        if len(chunk) < pending:
            return Scheduled(sequence, Row(chunk, sequence.computed, sequence.table.pages, outputs=0), 0)
        proposal = sequence.proposal[: max(0, budget - len(chunk))]
        row = Row(chunk + proposal, sequence.computed, sequence.table.pages, outputs=len(proposal) + 1)
        return Scheduled(sequence, row, len(proposal))

    def _make_room(self, part: Scheduled, preempted: list[Sequence]) -> Scheduled | None:
        """`part` with pages for its tokens, at the expense of its own draft tokens first, then of the newest
        sequences; None if its own sequence had to go."""
        while True:
            try:
                part.sequence.table.grow(part.row.stop)
                return part
            except OutOfPages:
                if part.drafted:
                    part = part.without_draft()
                    continue
                victim = self.running.pop()
                self._vacate(victim)
                self.waiting.appendleft(victim)
                preempted.append(victim)
                if victim is part.sequence:
                    return None
