"""Schedulers without an engine: sequences that wait, steps, and what an engine would commit."""

from __future__ import annotations

from collections.abc import Iterable

from ssd.config.params import Speculation
from ssd.execution.pages import PagePool, PageTable
from ssd.verifier.scheduler import Scheduled, Scheduler
from ssd.verifier.sequence import Sequence
from tests.verifier.scripted import submit

CONTEXT = 10_000


def sequence(pool: PagePool, request: int, prompt: int | Iterable[int], *, max_tokens: int = 8, k: int = 4) -> Sequence:
    """A request with this prompt, or one of so many tokens that no other one has."""
    if isinstance(prompt, int):
        prompt = range(CONTEXT * request, CONTEXT * request + prompt)
    asked = submit(request, prompt, k=k, max_tokens=max_tokens)
    return Sequence(
        asked, Speculation(num_speculative_tokens=4, fan_out=(3,), backup="jit"), CONTEXT, PageTable(pool), now=0.0
    )


def scheduler(budget: int, *, pages: int = 100, places: int = 8, lengths: list[int]) -> Scheduler:
    """With a sequence of each of these lengths waiting; pages of 4."""
    pool = PagePool(pages, 4)
    made = Scheduler(pool, places, budget)
    for request, length in enumerate(lengths):
        made.add(sequence(pool, request, length))
    return made


def commit(batch: list[Scheduled], accepted: int = 0) -> None:
    """What the engine does with a batch of which each row accepts at most `accepted` drafts."""
    for part in batch:
        s, row = part.sequence, part.row
        taken = min(accepted, part.drafted)
        known = len(row.token_ids) - part.drafted
        s.tokens += [*row.token_ids[known : known + taken], *([-7] if part.complete else [])]
        s.computed += known + taken
        s.proposal = []
        s.table.share_computed(s.tokens, s.computed)


def step(made: Scheduler) -> list[tuple[int, int]]:
    """One step; (request, tokens of its row) in the order of the batch."""
    made.admit()
    batch, _ = made.schedule()
    commit(batch)
    return [(part.sequence.request, len(part.row.token_ids)) for part in batch]


def requests(sequences: list[Sequence]) -> list[int]:
    return [s.request for s in sequences]


def drafts(made: Scheduler) -> list[int]:
    """How many of four proposed tokens each decoding sequence verifies in the next batch."""
    for s in made.running:
        s.proposal = [11, 12, 13, 14] if s.pending == 1 else []
    batch, _ = made.schedule()
    for part in batch:
        assert list(part.draft) == [11, 12, 13, 14][: part.drafted] and part.row.outputs == part.drafted + 1
    assert all(s.proposal == [11, 12, 13, 14] for s in made.running if s.pending == 1), "scheduling changes no proposal"
    return [part.drafted for part in batch if part.sequence.pending == 1]
