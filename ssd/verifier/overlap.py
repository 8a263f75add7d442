"""Overlap scheduling: the next verification is launched before the host has read the present one.

That is possible if outcomes alone decide the next batch: all running sequences are in this one and decode by their own
samples. A request that ends with its outcome has computed one row for nothing; the next owner of its pages overwrites
the row's keys and values."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch

from ssd.config.engine import EngineConfig
from ssd.config.params import MAX_LOOKAHEAD
from ssd.execution.adjustments import NUMBERS
from ssd.execution.batch import Row
from ssd.execution.graph_shapes import LONGEST_ROW, GraphShape, smallest_fitting
from ssd.execution.graphs import GraphPool, once
from ssd.execution.meanwhile import Task, nothing
from ssd.execution.pages import OutOfPages
from ssd.execution.static import StaticForward, StaticRunner
from ssd.execution.tables import Upload, uploaded
from ssd.ipc import board
from ssd.ipc.board import BoardReader, Cached
from ssd.ipc.device_board import DeviceBoard, page_locked
from ssd.ipc.trace_ring import State
from ssd.kernels.rounds import EntryLayout, RowLayout, decide, note_outcomes
from ssd.law import DRAWN, Law
from ssd.speculation.adjustment import Text
from ssd.speculation.noise import halves
from ssd.speculation.sampling import drawing_of, numbers_of, read_ids
from ssd.verifier.inline_draft import INLINE_MODES, InlineDraft
from ssd.verifier.overlap_choice import OverlapPolicy
from ssd.verifier.proposer import NextDraft, Result
from ssd.verifier.scheduler import Scheduled, part_of
from ssd.verifier.sequence import Sequence
from ssd.verifier.verification import (
    NO_LOGITS,
    PlainVerification,
    Verification,
    VerifiedBatch,
    laws_of,
    outcomes_of,
    texts_of,
)

_MOST_IDS = LONGEST_ROW - 1  # draft tokens of a row
_PLACES = 2 * LONGEST_ROW  # positions that two verifications can reach
# Words of a row's fields: three of the key and the base, numbers, law, draft ids, low and high halves of noise keys.
_SIZES = (4, 7, len(DRAWN), _MOST_IDS, _PLACES, _PLACES)
_ROW = RowLayout._make([*accumulate(_SIZES[:-1]), _MOST_IDS])
ENTRY = EntryLayout(board.KEY.start, board.DEPTH, board.CHECKSUM, board.IDS, MAX_LOOKAHEAD, board.SALT)
"""Where the device finds each field of a board's entry."""

Ask = Callable[[Sequence], NextDraft | None]
"""Called with a sequence that is verified now. Returns None if the host must see the outcome first."""


class FollowedRow(NamedTuple):
    """A row of one committed token and draft tokens, which a row of the next verification follows.

    `first`: index of its tokens in the batch. `round_key`: epoch, request and round of its outcome. `most`: bound on
    the next row's draft tokens. `left`: draft tokens of both rows that can be accepted before the text is full. `text`:
    set if the logits are adjusted. `inline`: a draft in this process makes the draft tokens."""

    row: Row
    law: Law
    first: int
    round_key: tuple[int, int, int]
    most: int
    left: int
    text: Text | None = None
    inline: bool = False

    @property
    def drafted(self) -> int:
        return len(self.row.token_ids) - 1

    @property
    def stop(self) -> int:
        """Return the most tokens with keys and values after the next row: it needs their pages."""
        return min(self.row.stop + 1 + self.most, self.row.start + 2 + self.left)


class DeviceScheduler:
    """Launches verifications on `runner`, at most one behind the one that the host waits for.

    All draft tokens of a verification are on the `board`, or of a `draft` on the same device."""

    def __init__(self, runner: StaticRunner, board: DeviceBoard, draft: InlineDraft | None = None) -> None:
        device = runner.model.device
        self._runner, self._board, self._draft = runner, board, draft
        self._most_rows = max(shape.rows for shape in runner.steps)
        self._rows = Upload((self._most_rows, sum(_SIZES)), torch.int64, device)
        self._tokens = torch.zeros(max(shape.tokens for shape in runner.steps), dtype=torch.int64, device=device)
        self._running, self._inline = self._tokens[:0], False
        cuda = device.type == "cuda"
        self._parts = len(self._tokens), self._most_rows * (3 + _MOST_IDS)
        self._report = torch.zeros(sum(self._parts), dtype=torch.int64)
        self._report = self._report.pin_memory() if cuda else self._report
        self._arrived = torch.cuda.Event() if cuda else None
        self._decide: Callable[[], None] = self._make_decision
        self._note_outcomes: Callable[[], None] = self._add_to_texts
        self._build: dict[GraphShape, Callable[[], None]] = {
            shape: partial(self._make_batch, step) for shape, step in runner.steps.items()
        }
        self._warm_up(cuda and runner.capture)

    @torch.inference_mode()
    def _warm_up(self, capture: bool) -> None:
        captured = GraphPool(self._rows.device.device).capture if capture else once
        self._decide = captured(self._decide)
        self._decide()  # the next captures read its result
        if self._draft is not None:
            self._draft.prepare(self._rows.device, lambda: self._decided, _ROW)
        if self._runner.adjustments is not None:
            self._note_outcomes = captured(self._note_outcomes)
        self._build = {shape: captured(make) for shape, make in self._build.items()}

    # -- what the host asks for ----------------------------------------------------------------------------------------

    def launch(self, rows: Items[Row], laws: Items[Law], texts: Items[Text | None] = ()) -> bool:
        """Start a new verification; return False if it has no static shape."""
        tokens = self._runner.launch(rows, laws, texts)
        if tokens is not None:
            self._running = tokens
        return tokens is not None

    def shape(self, rows: Items[int]) -> GraphShape | None:
        """Return the smallest shape for rows of at most these lengths, or None."""
        return smallest_fitting(rows, self._runner.steps)

    @torch.inference_mode()
    def launch_next(self, rows: Items[FollowedRow], shape: GraphShape) -> None:
        """Start the verification that follows `rows` of the running one, whose other rows end with it.

        It must fit `shape`, and the rows must have pages up to their `stop`."""
        size, step = self._runner.cache.page_size, self._runner.steps[shape]
        self._runner.tables.tell((each.row.slot, each.row.pages[: -(-each.stop // size)]) for each in rows)
        table = self._runner.adjustments if any(each.text for each in rows) else None
        if table is not None:
            table.tell((each.row.slot, each.text) for each in rows)
        self._fill(rows)
        self._tokens[: len(self._running)].copy_(self._running)
        self._decide_and_draft(rows)
        if table is not None:
            self._note_outcomes()
        self._build[shape]()
        step.run()
        self._running = step.tokens(drawing_of((each.law for each in rows), table is not None))

    def _decide_and_draft(self, rows: Items[FollowedRow]) -> None:
        """Find the outcomes of `rows`, draft after them; send both to the host."""
        most = max(each.most for each in rows)
        self._inline = self._draft is not None and any(each.inline for each in rows)
        if most and not self._inline:
            self._board.fetch(1 + max(each.row.slot for each in rows))
        self._decide()
        if self._draft is not None and self._inline:
            requests = [(each.row.slot, each.round_key[1]) for each in rows]
            self._draft.run(requests, most, drawing_of(each.law for each in rows))
            samples, drafted = self._report.split(self._parts)
            samples.copy_(self._tokens, non_blocking=True)
            drafted.copy_(self._draft.drafted.view(-1), non_blocking=True)
        else:
            self._report.copy_(self._told, non_blocking=True)
            if self._draft is not None:
                self._draft.drafted.copy_(self._decided)
        if self._arrived is not None:
            self._arrived.record()

    def report(self, rows: int) -> tuple[list[int], list[Cached]]:
        """Return the samples of the verification before the running one, and the draft tokens in the running one.

        Wait for the samples, of `rows` followed rows. An entry is -1 where a row has no draft tokens."""
        found = self._of_rows(rows)
        if self._inline:
            drafts = [Cached(0 if depth else -1, ids[:depth]) for _, _, depth, *ids in found]
        else:
            drafts = [Cached(entry, ids[:depth]) for entry, depth, _, *ids in found]
            self._board.reader.rejected += sum(unsound for _, _, unsound, *_ in found)
        return read_ids(self._report[: self._parts[0]], self._board.reader.vocab_size), drafts

    def _of_rows(self, rows: int) -> list[list[int]]:
        if self._arrived is not None:
            self._arrived.synchronize()
        found: list[list[int]] = self._report[self._parts[0] :].view(self._most_rows, -1)[:rows].tolist()
        return found

    @torch.inference_mode()
    def draft(self, rows: Items[FollowedRow], last: Items[int]) -> list[list[int]]:
        """Return `most` draft tokens behind the `last` token of each text; none if the draft fails.

        No verification may run: `rows` are as if one had these tokens as outcomes."""
        self._fill(rows)
        self._tokens[: len(last)].copy_(uploaded(torch.tensor(last), self._tokens.device))
        self._decide_and_draft(rows)
        found = self._of_rows(len(rows))
        failed = self._draft is None or self._draft.failed
        return [ids[: 0 if failed else row.most] for row, (_, _, _, *ids) in zip(rows, found, strict=True)]

    def samples(self) -> list[int]:
        """Wait for the running verification, and return all its samples."""
        return read_ids(self._running, self._board.reader.vocab_size)

    def _fill(self, rows: Items[FollowedRow]) -> None:
        self._rows.wait()
        host = self._rows.host
        host[:] = 0
        for words, each in zip(host, rows, strict=False):
            row, law = each.row, each.law
            words[: _ROW.numbers] = *each.round_key, row.start + 1
            words[_ROW.numbers : _ROW.law] = row.slot, each.first, each.drafted, each.most, each.left, row.start, 1
            words[_ROW.ids :][: each.drafted] = row.token_ids[1:]
            if law.temperature > 0.0:
                words[_ROW.law : _ROW.ids].view("float64")[:] = numbers_of(law)
                first = row.start + 2  # the token after the first committed one that the outcome adds
                keys = [halves((law.seed, first + place)) for place in range(each.drafted + each.most + 1)]
                words[_ROW.low :].reshape(2, _PLACES)[:, : len(keys)] = list(zip(*keys, strict=True))
        self._rows.send()

    # -- what the device does ------------------------------------------------------------------------------------------

    def _make_decision(self) -> None:
        self._decided, self._told = decide(self._rows.device, self._tokens, *self._board.words, _ROW, ENTRY)

    def _add_to_texts(self) -> None:
        table = self._runner.adjustments
        assert table is not None
        note_outcomes(self._rows.device, self._decided, table.words, NUMBERS, _ROW)

    def _make_batch(self, step: StaticForward) -> None:
        rows = min(step.shape.rows, self._most_rows)
        decided = self._decided if self._draft is None else self._draft.drafted
        step.follow(self._rows.device[:rows], decided[:rows], _ROW)


class _RunningRow(NamedTuple):
    """A row of the running verification: its draft tokens, and the index of its tokens in the batch."""

    sequence: Sequence
    drafts: Cached
    first: int


class OverlappedVerification:
    """Launches at most one verification behind the one that the engine waits for.

    `plain` runs batches that cannot be followed, and all while `policy` says that overlap does not pay."""

    def __init__(
        self, plain: PlainVerification, device: DeviceScheduler, ask: Ask, max_tokens: int, policy: OverlapPolicy
    ) -> None:
        self._plain, self._device, self._ask = plain, device, ask
        self._max_tokens, self._policy = max_tokens, policy
        self._running: list[_RunningRow] = []
        self._overlapped = False  # whether the last verification was launched behind another one
        self._ended = 0.0  # when the previous verification ended

    def running(self) -> list[Scheduled]:
        self._running = [row for row in self._running if row.sequence.slot >= 0]
        return [part_of(row.sequence, row.drafts.ids) for row in self._running]

    def verify(self, batch: list[Scheduled], running: int, host_work: Task = nothing) -> VerifiedBatch:
        self._overlapped = bool(self._running)
        verified = self._run(batch, running, host_work)
        if verified is None:
            return self._plain.verify(batch, running, host_work)
        if any(verified.spoiled()):
            self.drop()
        return self._plain.retried(verified)

    def drop(self) -> None:
        """Forget the running verification: it began with discarded tokens."""
        self._running, self._overlapped = [], False

    def learn(self, verified: VerifiedBatch, results: Items[Result | None]) -> None:
        between_s, self._ended = verified.began - self._ended, verified.ended
        decoded = [result for result in results if result is not None and result.round > 0]
        looked_up = [result for result in decoded if self._policy.looks_up(result.sequence.speculation.mode)]
        if len(decoded) < len(results) or not looked_up:
            return
        for result in looked_up:
            self._policy.note_row(result.cache == "hit", result.outcome.accepted + 1, self._overlapped)
        if not self._overlapped:
            self._policy.note_round(verified.ended - verified.began, between_s)

    def _run(self, batch: list[Scheduled], running: int, host_work: Task) -> VerifiedBatch | None:
        """Verify a batch on the device, and launch the next one behind it if possible.

        Return None for a new batch that cannot be followed or has no static shape."""
        began = self._ended if self._overlapped else time.perf_counter()
        lengths = [len(part.row.token_ids) for part in batch]
        firsts = [row.first for row in self._running] or _starts(lengths)
        allowed = len(batch) == running and self._policy.allows(part.sequence.speculation.mode for part in batch)
        laws = laws_of(batch) if allowed else None
        texts = texts_of(batch)
        rows = self._followed(batch, laws, firsts, texts) if laws else []
        shape = self._device.shape([1 + row.most for row in rows]) if rows else None
        if not self._overlapped and (
            shape is None or not self._device.launch([part.row for part in batch], laws or [], texts)
        ):
            return None
        self._plain.announce(batch)
        if shape is not None:
            self._device.launch_next(rows, shape)
        self._running = []
        host_work()
        in_flight: list[Cached] = []
        if shape is None:
            tokens = self._device.samples()
        else:
            tokens, in_flight = self._device.report(len(rows))
            begins = _starts([1 + len(drafts.ids) for drafts in in_flight])
            rows_in_flight = zip(batch, in_flight, begins, strict=True)
            self._running = [_RunningRow(part.sequence, drafts, first) for part, drafts, first in rows_in_flight]
        self._plain.trace.enter(State.SAMPLE)
        samples = [tokens[first : first + length] for first, length in zip(firsts, lengths, strict=True)]
        return VerifiedBatch(
            batch, samples, outcomes_of(batch, samples), NO_LOGITS, began, time.perf_counter(), in_flight
        )

    def _followed(
        self, batch: Items[Scheduled], laws: Items[Law], firsts: Items[int], texts: Items[Text | None]
    ) -> list[FollowedRow]:
        """Return the rows for the device; empty if the batch cannot be followed."""
        rows: list[FollowedRow] = []
        for part, law, first, text in zip(batch, laws, firsts, texts or [None] * len(batch), strict=True):
            sequence = part.sequence
            decodes = part.complete and len(part.row.token_ids) == part.sampled and sequence.round > 0
            asked = self._ask(sequence) if decodes and sequence.acceptable > 0 else None
            if asked is None:
                return []
            round_key = asked.epoch, sequence.request, sequence.round
            most = min(asked.most, _MOST_IDS)
            rows.append(FollowedRow(part.row, law, first, round_key, most, sequence.acceptable, text, asked.inline))
        mixed = len({row.inline for row in rows if row.most}) > 1
        if mixed or sum(1 + row.most for row in rows) > self._max_tokens:
            return []
        try:
            for part, row in zip(batch, rows, strict=True):
                part.sequence.table.grow(row.stop)
        except OutOfPages:
            return []
        return rows


def _starts(lengths: Items[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))[:-1]


def overlapped(
    plain: PlainVerification,
    config: EngineConfig,
    board: BoardReader,
    ask: Ask,
    inline: DeviceScheduler | None = None,
) -> Verification:
    """Return an `OverlappedVerification` for a target on a GPU with static shapes; elsewhere `plain`.

    Also `plain`: with a draft that reads hidden states, which the next forward overwrites; with several ranks, which
    the host tells what to run; with SSD_OVERLAP=0; and if a board that a draft's process writes cannot be
    page-locked."""
    runner = plain.runner
    cuda = runner.model.device.type == "cuda"
    alone = config.features is None and config.tensor_parallel_size == 1
    wanted = os.environ.get("SSD_OVERLAP") != "0"
    if not wanted or not isinstance(runner, StaticRunner) or not (inline or cuda) or not alone:
        return plain
    if cuda and config.drafts_apart and not page_locked(board):
        return plain
    device = inline or DeviceScheduler(runner, DeviceBoard(board, runner.model.device))
    policy = OverlapPolicy(("ar", *INLINE_MODES)) if inline else OverlapPolicy()
    return OverlappedVerification(plain, device, ask, config.max_num_batched_tokens, policy)
