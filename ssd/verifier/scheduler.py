"""Decides who is in the next batch, with how many tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from ssd.execution.batch import Row, StateUse
from ssd.execution.pages import OutOfPages, PagePool
from ssd.verifier.sequence import Sequence

# Most logits of one sequence that are held at a time, where those of all prompt tokens are wanted.
_PROMPT_OUTPUTS = 256


@dataclass(frozen=True)
class Scheduled:
    """A sequence's part of a step: its row ends with `drafted` draft tokens.

    A prefill chunk that does not reach the last committed token is not `complete`: its one sample shows only that its
    values are numbers. Log-probabilities are wanted of the first `prompt_outputs` outputs."""

    sequence: Sequence
    row: Row
    drafted: int
    complete: bool = True
    prompt_outputs: int = 0

    @property
    def draft(self) -> Items[int]:
        return self.row.token_ids[len(self.row.token_ids) - self.drafted :]

    @property
    def sampled(self) -> int:
        return self.drafted + 1

    @property
    def predicted(self) -> range:
        return self.row.predicted[-self.sampled :]

    def without_draft(self) -> Scheduled:
        """Return this part without draft tokens, to run again from the state before its row."""
        known = self.row.token_ids[: len(self.row.token_ids) - self.drafted]
        row = replace(self.row, token_ids=known, outputs=self.row.outputs - self.drafted)
        if row.state is not None:
            row = replace(row, state=StateUse(row.start, None, row.stop))
        return replace(self, row=row, drafted=0)

    def with_state(self) -> Scheduled:
        """Return this part with its use of the sequence's state, if layers have one; the part must run.

        Draft tokens leave the state as it is before the row, which may have to run again without them."""
        row, lasting = self.row, self.complete and self.sequence.round == 0
        state = self.sequence.table.use_state(row.start if self.drafted else row.stop, lasting)
        return self if state is None else replace(self, row=replace(row, state=state))


class Scheduler:
    """Owns waiting and running sequences. The rows of a step have at most `max_tokens` tokens.

    A sequence that decodes gets its one token first, even beyond the budget. Draft tokens leave half of the budget to
    prompts. The shortest prompt is read first; the oldest advances in every step, so that nobody starves."""

    def __init__(self, pool: PagePool, max_sequences: int, max_tokens: int) -> None:
        self._pool, self._max_tokens = pool, max_tokens
        self._free_slots = list(range(max_sequences))[::-1]
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def find(self, request: int) -> Sequence | None:
        return next((s for s in (*self.running, *self.waiting) if s.request == request), None)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and its pages. No step may be in flight."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._vacate(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _vacate(self, sequence: Sequence) -> None:
        sequence.lose_pages()
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    # -- places -----------------------------------------------------------------------------------------------------

    def admit(self) -> list[Sequence]:
        """Move waiting sequences to free slots, in order, and return them.

        A sequence begins when there are pages for its tokens beyond those that running sequences need; alone it always
        begins, as the configuration guarantees that it can finish."""
        admitted: list[Sequence] = []
        owed = sum(_missing(s) for s in self.running) if self.waiting and self._free_slots else 0
        while self.waiting and self._free_slots:
            sequence = self.waiting[0]
            sequence.adopt()
            owed += _missing(sequence)
            if self.running and owed > self._pool.available:
                sequence.lose_pages()
                break
            self.waiting.popleft()
            sequence.slot = self._free_slots.pop()
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    # -- the batch --------------------------------------------------------------------------------------------------

    def schedule(self) -> tuple[list[Scheduled], list[Sequence]]:
        """Return the next batch, oldest first, and the newest sequences, which lost their pages to it."""
        batch: list[Scheduled] = []
        preempted: list[Sequence] = []
        for sequence, count in self._shares():
            if sequence.slot < 0:
                continue  # preempted for an older one, in this loop
            part = self._make_room(part_of(sequence, sequence.proposal, count), preempted)
            if part is not None:
                batch.append(part.with_state())
        return batch, preempted

    def _shares(self) -> list[tuple[Sequence, int]]:
        """Return running sequences with the tokens that each computes, draft tokens included."""
        for sequence in self.running:
            if sequence.pending > 1:
                sequence.adopt()
        decoding = [s for s in self.running if s.pending == 1]
        reading = [s for s in self.running if s.pending > 1]
        left = self._max_tokens - len(decoding)
        kept = min(sum(s.pending for s in reading), (self._max_tokens + 1) // 2)
        drafts = even_shares([len(s.proposal) for s in decoding], left - kept)
        counts = {s.request: 1 + drafted for s, drafted in zip(decoding, drafts, strict=True)}
        if reading:
            counts |= self._prefill_chunks(reading, max(1, left - sum(drafts)))
        return [(s, counts[s.request]) for s in self.running if s.request in counts]

    def _prefill_chunks(self, reading: Items[Sequence], budget: int) -> dict[int, int]:
        """Return by request how many tokens of its prompt each sequence reads.

        The shortest rest comes first, but the oldest has an equal share. A sequence that needs a page which another one
        computes now waits, and finds the page in the prefix cache."""
        chunks: dict[int, int] = {}
        reads: list[tuple[Sequence, int]] = []
        turns = [(reading[0], max(1, budget // len(reading)))]
        turns += [(s, budget) for s in sorted(reading, key=lambda s: s.pending)]
        for sequence, most in turns:
            begun = chunks.get(sequence.request, 0)
            if not begun and any(self._computes_for(other, count, sequence) for other, count in reads):
                continue
            wanted = min(sequence.pending, _PROMPT_OUTPUTS) if sequence.collects else sequence.pending
            more = min(most, budget, wanted - begun)
            if more > 0:
                chunks[sequence.request] = begun + more
                reads.append((sequence, begun + more))
                budget -= more
        return chunks

    def _computes_for(self, other: Sequence, count: int, sequence: Sequence) -> bool:
        """Return True if `other`'s next `count` tokens reach the page that `sequence` may share next."""
        size = self._pool.size
        start = sequence.computed // size * size
        stop = start + size
        return (
            other.table.salt == sequence.table.salt
            and stop <= min(sequence.adoptable, len(other.tokens))
            and other.computed < stop
            and other.computed + count > start
            and other.tokens[start:stop] == sequence.tokens[start:stop]
            and other.tokens[:start] == sequence.tokens[:start]
        )

    def _make_room(self, part: Scheduled, preempted: list[Sequence]) -> Scheduled | None:
        """Return `part` with pages for its tokens; None if its own sequence was preempted.

        Draft tokens that do not fit go first, then the newest sequences."""
        while True:
            try:
                part.sequence.table.grow(part.row.stop)
                return part
            except OutOfPages:
                if part.drafted:
                    # To drop all because they are many would bias the ratio rule: their number may depend on them.
                    sequence, room = part.sequence, len(part.sequence.table.pages) * self._pool.size
                    count = max(sequence.pending, room - sequence.computed)
                    part = part_of(sequence, sequence.proposal, count)
                    continue
                victim = self.running.pop()
                self._vacate(victim)
                self.waiting.appendleft(victim)
                preempted.append(victim)
                if victim is part.sequence:
                    return None


def _missing(sequence: Sequence) -> int:
    return sequence.table.missing(len(sequence.tokens) + 1)


def part_of(sequence: Sequence, proposal: Items[int], count: int | None = None) -> Scheduled:
    """Return a part with a sequence's next `count` tokens, or all: committed ones, then `proposal`."""
    count = sequence.pending + len(proposal) if count is None else count
    chunk = sequence.tokens[sequence.computed : sequence.computed + count]
    complete = len(chunk) == sequence.pending
    proposal = list(proposal[: count - len(chunk)])
    about_prompt = sequence.uncollected(sequence.computed + len(chunk))
    outputs = about_prompt + 1 + len(proposal) if complete else max(1, about_prompt)
    row = Row(chunk + proposal, sequence.computed, sequence.table.pages, outputs, sequence.slot)
    return Scheduled(sequence, row, len(proposal), complete, about_prompt)


def even_shares(wants: Items[int], budget: int) -> list[int]:
    """Return max-min fair shares of a budget: one at a time in order, to those that want more.

    No want beyond k changes who gets a k-th one: the ratio rule needs this."""
    shares, budget = [0] * len(wants), max(0, budget)
    wanting = [index for index, want in enumerate(wants) if want]
    while wanting and budget:
        for index in wanting[:budget]:
            shares[index] += 1
        budget -= min(budget, len(wanting))
        wanting = [index for index in wanting if shares[index] < wants[index]]
    return shares
