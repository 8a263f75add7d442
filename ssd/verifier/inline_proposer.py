"""Gets draft tokens from a draft in the target's process (`ssd.verifier.inline_draft`)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from collections.abc import Sequence as Items

import torch

from ssd.config.engine import EngineConfig
from ssd.config.params import AUTO_LOOKAHEAD
from ssd.execution.batch import Row
from ssd.execution.graph_shapes import LONGEST_ROW, GraphShape, smallest_fitting
from ssd.execution.meanwhile import Task, nothing
from ssd.execution.static import StaticRunner
from ssd.ipc.board import BoardReader
from ssd.ipc.device_board import DeviceBoard
from ssd.ipc.messages import DraftState
from ssd.ipc.trace_ring import NO_TRACE, State, TraceRing
from ssd.speculation.theory import expected_tokens
from ssd.tuning.estimates import Estimates
from ssd.verifier.inline_draft import InlineDraft, InlineRunner
from ssd.verifier.memory import SuffixMemory
from ssd.verifier.misses import Guess, WaitCosts
from ssd.verifier.overlap import DeviceScheduler, FollowedRow, OverlappedVerification, overlapped
from ssd.verifier.overlap_choice import OverlapPolicy
from ssd.verifier.proposer import Counters, Proposer, Result
from ssd.verifier.sequence import Sequence
from ssd.verifier.verification import PlainVerification, Verification


def inline(
    config: EngineConfig, plain: PlainVerification, board: BoardReader, runner: InlineRunner | None
) -> tuple[Proposer, Verification]:
    """Return what proposes draft tokens, and runs verifications, in an engine whose draft is that of `runner`."""
    target, memory = plain.runner, SuffixMemory.of(config)
    if runner is None or not isinstance(target, StaticRunner):
        return Proposer(), overlapped(plain, config, board, Proposer().asks)
    draft = InlineDraft(config, runner)
    device = DeviceScheduler(target, DeviceBoard(board, target.model.device), draft)
    proposer = InlineProposer(draft, device, _Lookahead(target, draft).best, memory, plain.trace)
    if os.environ.get("SSD_OVERLAP") == "0":
        return proposer, plain
    policy = OverlapPolicy(always=True)
    return proposer, OverlappedVerification(plain, device, proposer.asks, config.max_num_batched_tokens, policy)


class _Lookahead:
    """Chooses K for requests that leave it open: by an acceptance rate, and by times measured at the start."""

    @torch.inference_mode()
    def __init__(self, runner: StaticRunner, draft: InlineDraft) -> None:
        self._drafting = {rows: _seconds(work, runner.model.device) for rows, work in draft.forwards().items()}
        self._verifying: dict[int, dict[int, float]] = {}
        measured: dict[GraphShape, float] = {}
        for rows in self._drafting:
            for lookahead in range(1, AUTO_LOOKAHEAD + 1):
                shape = smallest_fitting([1 + lookahead] * rows, runner.steps)
                if shape is None:
                    break
                if shape not in measured:
                    measured[shape] = _seconds(runner.steps[shape].run, runner.model.device)
                self._verifying.setdefault(rows, {})[lookahead] = measured[shape]

    def best(self, rows: int, acceptance: float) -> int:
        """Return the K that brings most tokens per second in a batch of this number of rows."""
        size = min((size for size in self._drafting if size >= rows), default=max(self._drafting))
        costs, drafting = self._verifying.get(size, {1: 1.0}), self._drafting[size]
        return max(costs, key=lambda k: expected_tokens(acceptance, k) / (costs[k] + k * drafting))


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    """Return the least seconds of three runs on the device."""
    found = []
    for _ in range(4):  # the first one is a warm-up
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return min(found[1:])


class InlineProposer(Proposer):
    """Drafts for requests in mode `sd`: behind each verification on the device, else before the next one.

    The latter is so for a request's first round, and wherever verifications do not overlap. `memory`: guesses from
    earlier texts, which are verified instead of the draft's tokens where they should bring more. `lookahead` chooses K
    where a request does not give it."""

    def __init__(
        self,
        draft: InlineDraft,
        device: DeviceScheduler,
        lookahead: Callable[[int, float], int],
        memory: SuffixMemory | None = None,
        trace: TraceRing = NO_TRACE,
    ) -> None:
        self._draft, self._device, self._memory, self._trace = draft, device, memory, trace
        self._choose, self._chosen = lookahead, 1
        self._missed: dict[int, Guess | None] = {}  # requests without draft tokens, and the memory's guess
        self._guessed = set[int]()  # requests whose last guess was better than the draft's tokens
        self._estimates = Estimates()
        self._costs = WaitCosts(self._estimates)

    @property
    def state(self) -> DraftState:
        return "down" if self._draft.failed else "up"

    @property
    def counters(self) -> Counters:
        return Counters(steps=self._draft.steps)

    @property
    def plan(self) -> str:
        return f"sd: K = {self._chosen} at {self._estimates.acceptance.value:.0%} acceptance"

    def asks(self, sequence: Sequence) -> tuple[int, int] | None:
        if not self._drafts(sequence):
            return 0, 0
        if sequence.request in self._guessed or not self._draft.has_read(sequence):
            return None
        drafted, most = len(sequence.proposal), self._most(sequence)
        stop = len(sequence.tokens) + drafted + 1 + most
        has_pages = self._draft.pages(sequence, min(stop, sequence.max_model_len)) is not None
        return 0, most if has_pages else 0

    def outcomes(self, results: Items[Result]) -> None:
        for result in results:
            sequence, taken = result.sequence, result.taken
            self._draft.committed(sequence, 0 if taken is None else len(taken.ids))
            if result.drafted and result.source == "draft":
                self._estimates.acceptance.note_outcome(result.drafted, result.outcome.accepted)
            guess = self._better_guess(sequence)
            if taken is None:
                self._missed[sequence.request] = guess
            else:
                sequence.proposal = taken.ids

    def settle(self, sequences: Items[Sequence], meanwhile: Task = nothing) -> float:
        self._chosen = self._choose(len(sequences), self._estimates.acceptance.value)
        missed = [sequence for sequence in sequences if sequence.request in self._missed]
        if not missed:
            return 0.0
        began = time.perf_counter()
        for sequence in missed:
            if (guess := self._missed.pop(sequence.request)) is not None:
                sequence.proposal, sequence.source = list(guess.tokens), "memory"
        rows = [sequence for sequence in missed if not sequence.proposal and self._drafts(sequence)]
        if rows:
            self._trace.enter(State.WAIT_FOR_DRAFT, max(map(self._lookahead, rows)))
            meanwhile()
            self._propose(rows)
            self._trace.enter(State.OTHER)
        return time.perf_counter() - began

    def release(self, sequences: Items[Sequence]) -> None:
        for sequence in sequences:
            self._missed.pop(sequence.request, None)
            self._guessed.discard(sequence.request)
        if self._memory is not None:
            self._memory.release(sequences)
        self._draft.release(sequences)

    def _drafts(self, sequence: Sequence) -> bool:
        wants = sequence.speculation.mode == "sd" and sequence.rule.emits_samples
        return wants and sequence.acceptable > 0 and not self._draft.failed

    def _most(self, sequence: Sequence) -> int:
        return min(sequence.speculation.num_speculative_tokens or self._chosen, LONGEST_ROW - 1)

    def _lookahead(self, sequence: Sequence) -> int:
        return min(self._most(sequence), sequence.acceptable)

    def _better_guess(self, sequence: Sequence) -> Guess | None:
        """Return the memory's guess if it should bring more than the draft's tokens."""
        guess = None
        if self._memory is not None and sequence.speculation.mode == "sd":
            guess = self._memory.guess(sequence, self._costs.pricing)
        if guess is None or guess.gain <= self._costs.draft_gain(self._lookahead(sequence)):
            self._guessed.discard(sequence.request)
            return None
        self._guessed.add(sequence.request)
        return guess

    def _propose(self, sequences: Items[Sequence]) -> None:
        """Read the new texts of sequences, and draft behind those that are read to their ends."""
        try:
            ready = [each for each in self._draft.read(sequences) if self._has_pages(each)]
            rows = [self._row(index, sequence) for index, sequence in enumerate(ready)]
            found = self._device.draft(rows, [sequence.tokens[-1] for sequence in ready]) if rows else []
        except Exception:
            self._draft.fail()
            return
        for sequence, ids in zip(ready, found, strict=True):
            sequence.proposal = ids
            self._draft.committed(sequence, len(ids))

    def _has_pages(self, sequence: Sequence) -> bool:
        return self._draft.pages(sequence, len(sequence.tokens) + self._lookahead(sequence)) is not None

    def _row(self, index: int, sequence: Sequence) -> FollowedRow:
        """Return a row as if its last token were the outcome of a running verification."""
        before, most = Row([0], len(sequence.tokens) - 2, (), slot=sequence.slot), self._lookahead(sequence)
        key = 0, sequence.request, sequence.round
        return FollowedRow(before, sequence.sampled_by, index, key, most, most + 1)
