"""Who is in the next batch, with how many tokens (continuous batching, chunked prefill, preemption)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

from ssd.execution.batch import Row
from ssd.execution.pages import OutOfPages, PagePool
from ssd.target.sequence import Sequence

# Logits of so many prompt tokens of one sequence are held at a time, where all of them are wanted.
_PROMPT_OUTPUTS = 256


@dataclass(frozen=True)
class Scheduled:
    """A sequence's part of a step: its row ends with `drafted` draft tokens, and its last `drafted` + 1 outputs are
    sampled.

    A row that is not `complete`, a prefill chunk, does not reach the end of the committed tokens: its one sample shows
    only that its values are numbers. Of the first `prompt_outputs` outputs the log-probabilities are wanted.
    """

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
        """The positions that are sampled."""
        return self.row.predicted[-self.sampled :]

    def without_draft(self) -> Scheduled:
        """The same part with committed tokens only."""
        known = self.row.token_ids[: len(self.row.token_ids) - self.drafted]
        return replace(self, row=replace(self.row, token_ids=known, outputs=self.row.outputs - self.drafted), drafted=0)


class Scheduler:
    """Waiting and running sequences; the rows of one step carry at most `max_tokens` tokens in all.

    A sequence that decodes gets its one token first, even beyond the budget. Draft tokens leave half of the budget to
    prompts, where so much of them is left to read. Prompts share what remains so that a short one does not wait for a
    long one, and nobody starves: the oldest one advances in every step.
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

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence wherever it is and give its pages back. No step may be in flight."""
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
        """Move waiting sequences to free slots, in order; returns those that begin, or begin again after a preemption.

        One begins when there are pages for all it has now, besides those that running ones still need for what they
        have. Alone it may always start: configuration guarantees that it can finish.
        """
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
        """The next batch, oldest first, and the sequences that lost their pages to it: the newest, at the front of the
        queue with their tokens and counters, to be computed again."""
        batch: list[Scheduled] = []
        preempted: list[Sequence] = []
        for sequence, count in self._shares():
            if sequence.slot < 0:
                continue  # preempted for an older one, in this loop
            part = self._make_room(part_of(sequence, sequence.proposal, count), preempted)
            if part is not None:
                batch.append(part)
        return batch, preempted

    def _shares(self) -> list[tuple[Sequence, int]]:
        """How many tokens each running sequence computes, draft tokens included; those that compute none left out."""
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
            counts |= self._pieces(reading, max(1, left - sum(drafts)))
        return [(s, counts[s.request]) for s in self.running if s.request in counts]

    def _pieces(self, reading: Items[Sequence], budget: int) -> dict[int, int]:
        """How many tokens of its prompt each sequence reads, by request.

        The shortest rest comes first, of equals the oldest, so that most requests begin soonest: equal pieces would
        begin none of them before all. But the oldest has at least an equal share. Whoever needs a page that another
        reads in this step waits, and finds it in the cache.
        """
        pieces: dict[int, int] = {}
        reads: list[tuple[Sequence, int]] = []
        turns = [(reading[0], max(1, budget // len(reading)))]
        turns += [(s, budget) for s in sorted(reading, key=lambda s: s.pending)]
        for sequence, most in turns:
            begun = pieces.get(sequence.request, 0)
            if not begun and any(self._reads_for(other, count, sequence) for other, count in reads):
                continue
            wanted = min(sequence.pending, _PROMPT_OUTPUTS) if sequence.collects else sequence.pending
            more = min(most, budget, wanted - begun)
            if more > 0:
                pieces[sequence.request] = begun + more
                reads.append((sequence, begun + more))
                budget -= more
        return pieces

    def _reads_for(self, other: Sequence, count: int, sequence: Sequence) -> bool:
        """Whether `other` computes some of the page that `sequence` needs next, and may have from it, as it reads
        `count` tokens."""
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


def _missing(sequence: Sequence) -> int:
    """Pages to be allocated before it has written its next token."""
    return sequence.table.missing(len(sequence.tokens) + 1)


def part_of(sequence: Sequence, proposal: Items[int], count: int | None = None) -> Scheduled:
    """A sequence's next `count` tokens, or all of them; those beyond the committed ones are of the `proposal`."""
    count = sequence.pending + len(proposal) if count is None else count
    chunk = sequence.tokens[sequence.computed : sequence.computed + count]
    complete = len(chunk) == sequence.pending
    proposal = list(proposal[: count - len(chunk)])
    about_prompt = sequence.uncollected(sequence.computed + len(chunk))
    outputs = about_prompt + 1 + len(proposal) if complete else max(1, about_prompt)
    row = Row(chunk + proposal, sequence.computed, sequence.table.pages, outputs, sequence.slot)
    return Scheduled(sequence, row, len(proposal), complete, about_prompt)


def even_shares(wants: Items[int], budget: int) -> list[int]:
    """Max-min fair shares of a budget: equal ones, where what one does not want goes to the others, and what cannot be
    divided to those who want most, of equals to the first. Nothing where the budget is not positive."""
    shares = [0] * len(wants)
    budget = max(0, budget)
    for served, index in enumerate(sorted(range(len(wants)), key=lambda i: (wants[i], -i))):
        shares[index] = min(wants[index], budget // (len(wants) - served))
        budget -= shares[index]
    return shares
