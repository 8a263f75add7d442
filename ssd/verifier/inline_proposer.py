"""Gets draft tokens from a draft in the target's process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Items

import torch

from ssd.config.engine import EngineConfig
from ssd.config.params import AUTO_LOOKAHEAD
from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.execution.graph_shapes import LONGEST_ROW, GraphShape, smallest_fitting
from ssd.execution.meanwhile import Task, nothing
from ssd.execution.static import StaticRunner
from ssd.ipc.board import BoardReader
from ssd.ipc.device_board import DeviceBoard
from ssd.ipc.messages import DraftState
from ssd.ipc.trace_ring import NO_TRACE, State, TraceRing
from ssd.speculation.theory import expected_tokens
from ssd.tuning.estimates import Mean
from ssd.verifier.inline_draft import INLINE_MODES, InlineDraft
from ssd.verifier.loading import load_draft
from ssd.verifier.misses import GuessedTokens, forced_tokens
from ssd.verifier.overlap import DeviceScheduler, FollowedRow
from ssd.verifier.proposer import Counters, NextDraft, Proposer, Result
from ssd.verifier.sequence import Sequence
from ssd.verifier.suffix_memory import SuffixMemory
from ssd.verifier.verification import PlainVerification

log = logging.getLogger("ssd.target")

_ACCEPTANCE, _SMOOTHING = 0.5, 0.01  # an acceptance rate until it is measured, and the smoothing of the measured one


def inline(
    config: EngineConfig, plain: PlainVerification, board: BoardReader, memory: SuffixMemory | None
) -> InlineProposer | None:
    """Load the draft into this process, and return what proposes its tokens; None without room.

    Raises UsageError for a model that cannot draft."""
    target = plain.runner
    assert isinstance(target, StaticRunner), "a target in static shapes"
    try:
        draft = InlineDraft(config, load_draft(config))
        device = DeviceScheduler(target, DeviceBoard(board, target.model.device), draft)
        return InlineProposer(draft, device, RoundTimes(target, draft), memory, plain.trace)
    except UsageError as error:
        raise UsageError(f"the draft {config.draft}: {error}") from error
    except Exception:
        log.exception("decoding goes on without the draft %s, which cannot be prepared", config.draft)
        return None


class RoundTimes:
    """Seconds of verifications and of the draft's forwards (`drafting`) by rows, behind short texts."""

    @torch.inference_mode()
    def __init__(self, runner: StaticRunner, draft: InlineDraft) -> None:
        self.drafting = {rows: _seconds(work, runner.model.device) for rows, work in draft.forwards().items()}
        self._verifying: dict[int, list[float]] = {}
        measured: dict[GraphShape, float] = {}
        for rows in self.drafting:
            self._verifying[rows] = costs = list[float]()
            while len(costs) < LONGEST_ROW:
                shape = smallest_fitting([1 + len(costs)] * rows, runner.steps)
                if shape is None:
                    break
                if shape not in measured:
                    measured[shape] = _seconds(runner.steps[shape].run, runner.model.device)
                costs.append(measured[shape])

    def best(self, rows: int, acceptance: float) -> int:
        """Return the K that brings most tokens per second in a batch of `rows` rows."""
        most = max(1, min(AUTO_LOOKAHEAD, len(self._verifying[self._size(rows)]) - 1))
        return max(range(1, most + 1), key=lambda k: expected_tokens(acceptance, k) / self._round_s(rows, k))

    def pricing(self, rows: int, acceptance: float, lookahead: int) -> Callable[[int], float]:
        """Return a function: the price in tokens of more tokens, what a row brings in its part of their time."""
        costs = self._verifying[self._size(rows)]
        speed = expected_tokens(acceptance, lookahead) / self._round_s(rows, lookahead)
        return lambda more: speed * (costs[min(more, len(costs) - 1)] - costs[0])

    def _round_s(self, rows: int, lookahead: int) -> float:
        size = self._size(rows)
        costs = self._verifying[size]
        return costs[min(lookahead, len(costs) - 1)] + lookahead * self.drafting[size]

    def _size(self, rows: int) -> int:
        return min((size for size in self.drafting if size >= rows), default=max(self.drafting))


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    """Return the least seconds of three runs on the device."""
    found = []
    for _ in range(4):  # the first one is a warm-up
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return max(1e-9, min(found[1:]))


class InlineProposer(Proposer):
    """Drafts for requests in mode `sd`: behind each verification on the device, else before the next one.

    Before: in a request's first round, and where verifications do not overlap. `times` choose an open K, and price
    guesses of the `memory`, which replace draft tokens where they should bring more. Forced tokens come before both."""

    def __init__(
        self,
        draft: InlineDraft,
        device: DeviceScheduler,
        times: RoundTimes,
        memory: SuffixMemory | None = None,
        trace: TraceRing = NO_TRACE,
    ) -> None:
        self._draft, self.device, self._memory, self._trace = draft, device, memory, trace
        self.times, self._rows, self._chosen, self._open = times, 1, 1, False
        self._missed: dict[int, GuessedTokens | None] = {}  # requests without draft tokens, and the memory's guess
        self._guessed = set[int]()  # requests whose last guess was better than the draft's tokens
        self._acceptance = Mean(_ACCEPTANCE, _SMOOTHING)

    @property
    def state(self) -> DraftState:
        return "down" if self._draft.failed else "up"

    @property
    def counters(self) -> Counters:
        return Counters(steps=self._draft.steps)

    @property
    def plan(self) -> str:
        chosen = self._open and not self._draft.failed
        return f"sd, K {self._chosen}: {self._acceptance.value:.0%} of draft tokens are right" if chosen else ""

    def asks(self, sequence: Sequence) -> NextDraft | None:
        if sequence.request in self._guessed:
            return None  # the memory guesses only after the outcome
        if not self.drafts(sequence):
            return NextDraft()
        if not self._draft.has_read(sequence):
            return None
        most = self._most(sequence)
        stop = min(len(sequence.tokens) + len(sequence.proposal) + 1 + most, sequence.max_model_len)
        return NextDraft(most=most, inline=True) if self._draft.makes_room(sequence, stop) else NextDraft()

    def outcomes(self, results: Items[Result]) -> None:
        for result in results:
            sequence, taken = result.sequence, result.taken
            if sequence.speculation.mode not in INLINE_MODES:
                self.leave([sequence])
                continue
            self._draft.committed(sequence, 0 if taken is None else len(taken.ids))
            if result.drafted and result.source == "draft":
                self._acceptance.note_outcome(result.drafted, result.outcome.accepted)
            guess = self._better_guess(sequence)
            if taken is None:
                self._missed[sequence.request] = guess
            else:
                sequence.proposal = taken.ids

    def settle(self, sequences: Items[Sequence], meanwhile: Task = nothing) -> float:
        self._rows = max(1, len(sequences))
        drafted = [sequence for sequence in sequences if sequence.speculation.mode in INLINE_MODES]
        self._open = not all(sequence.speculation.num_speculative_tokens for sequence in drafted)
        if self._open:
            self._chosen = self.times.best(self._rows, self._acceptance.value)
        missed = [sequence for sequence in drafted if sequence.request in self._missed]
        if not missed:
            return 0.0
        began = time.perf_counter()
        for sequence in missed:
            guess = self._missed.pop(sequence.request)
            if forced := forced_tokens(sequence):
                sequence.proposal, sequence.source = forced[: LONGEST_ROW - 1], "grammar"
            elif guess is not None:
                sequence.proposal, sequence.source = list(guess.tokens), "memory"
        rows = [sequence for sequence in missed if not sequence.proposal and self._wants(sequence)]
        if rows:
            self._trace.enter(State.WAIT_FOR_DRAFT, max(map(self._lookahead, rows)))
            meanwhile()
            self._propose(rows)
            self._trace.enter(State.OTHER)
        return time.perf_counter() - began

    def release(self, sequences: Items[Sequence]) -> None:
        if self._memory is not None:
            self._memory.release(sequences)
        self.leave(sequences)

    def leave(self, sequences: Items[Sequence]) -> None:
        for sequence in sequences:
            self._missed.pop(sequence.request, None)
            self._guessed.discard(sequence.request)
        self._draft.release(sequences)

    def drafts(self, sequence: Sequence) -> bool:
        return self._wants(sequence) and not self._draft.is_full(sequence)

    def _wants(self, sequence: Sequence) -> bool:
        wants = sequence.speculation.mode in INLINE_MODES and sequence.rule.emits_samples
        return wants and sequence.acceptable > 0 and not self._draft.failed

    def _most(self, sequence: Sequence) -> int:
        return min(sequence.speculation.num_speculative_tokens or self._chosen, LONGEST_ROW - 1)

    def _lookahead(self, sequence: Sequence) -> int:
        return min(self._most(sequence), sequence.acceptable)

    def _better_guess(self, sequence: Sequence) -> GuessedTokens | None:
        """Return the memory's guess if it should bring more than draft tokens, cut to a graph's row."""
        guess, gain, acceptance = None, 0.0, self._acceptance.value
        if self._memory is not None:
            lookahead = self._lookahead(sequence) if self._wants(sequence) else 0
            price = self.times.pricing(self._rows, acceptance, lookahead)
            guess = self._memory.guess(sequence, lambda: price)
            gain = expected_tokens(acceptance, lookahead) - 1 - price(lookahead)
        if guess is None or guess.gain <= gain:
            self._guessed.discard(sequence.request)
            return None
        self._guessed.add(sequence.request)
        return guess._replace(tokens=guess.tokens[: LONGEST_ROW - 1])

    def _propose(self, sequences: Items[Sequence]) -> None:
        """Let the draft read new tokens, and draft for each sequence read to the end."""
        try:
            read, room = self._draft.read(sequences), self._draft.makes_room
            ready = [each for each in read if room(each, len(each.tokens) + self._lookahead(each))]
            rows = [self._row(index, sequence) for index, sequence in enumerate(ready)]
            found = self.device.draft(rows, [sequence.tokens[-1] for sequence in ready]) if rows else []
        except Exception:
            self._draft.fail()
            return
        for sequence, ids in zip(ready, found, strict=True):
            sequence.proposal = ids
            self._draft.committed(sequence, len(ids))

    def _row(self, index: int, sequence: Sequence) -> FollowedRow:
        """Return a row as if its last token were the outcome of a running verification."""
        before, most = Row([0], len(sequence.tokens) - 2, (), slot=sequence.slot), self._lookahead(sequence)
        key = 0, sequence.request, sequence.round
        return FollowedRow(before, sequence.sampled_by, index, key, most, most + 1, inline=True)
