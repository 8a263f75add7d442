"""Overlap scheduling: the next verification is launched while the host has not yet read the one before.

A verification is followed where its outcomes alone decide about the next one: all running sequences are in it and
decode, each by its own samples. The device makes the next batch itself (`DeviceScheduler`), of the outcomes and of what
the draft has published for them. A request that ends with its outcome has run for nothing in the next one. What that
one wrote lies behind the committed tokens, and whoever gets the pages writes them later."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ssd.config.engine import EngineConfig
from ssd.config.params import MAX_LOOKAHEAD
from ssd.execution.batch import Row
from ssd.execution.graph_shapes import LONGEST_ROW, GraphShape, smallest_fitting
from ssd.execution.graphs import GraphPool, once
from ssd.execution.meanwhile import Task, nothing
from ssd.execution.pages import OutOfPages
from ssd.execution.static import StaticRunner, Step, draws_of
from ssd.execution.tables import Draw, Upload
from ssd.ipc import board
from ssd.ipc.board import BoardReader, Cached
from ssd.ipc.device_board import DeviceBoard, page_locked
from ssd.ipc.trace_ring import State
from ssd.kernels.gpu import RoundLayout, fuses
from ssd.speculation.acceptance import coupled_rows
from ssd.speculation.adjustment import NUMBERS, Text
from ssd.speculation.sampling import Law, drawing_of, read_ids
from ssd.verifier.overlap_choice import OverlapPolicy, undrafted
from ssd.verifier.proposer import Result
from ssd.verifier.scheduler import Scheduled, part_of
from ssd.verifier.sequence import Sequence
from ssd.verifier.verification import NO_LOGITS, PlainVerification, Verification, VerifiedBatch, laws_of, texts_of

_MOST_IDS = LONGEST_ROW - 1  # draft tokens of a row
_PLACES = 2 * LONGEST_ROW  # positions that two verifications can reach
# Of a row: three words of the key and the base, numbers of `_NUMBERS`, ids, halves of the noise's keys.
_NUMBERS = 11
_SIZES = (4, _NUMBERS, _MOST_IDS, _PLACES, _PLACES)

Ask = Callable[[Sequence], tuple[int, int] | None]
"""For a sequence that is verified now: the draft's epoch, and how many tokens its next row may take from the board.
None if the host must see the outcome first."""


class FollowedRow(NamedTuple):
    """A row of one committed token and draft tokens, which a row of the next verification follows.

    `first` is where its tokens begin in the batch, `round_key` the epoch, request and round of its outcome. The next
    row may have `most` draft tokens. Of both rows' draft tokens `left` can be accepted before the text is full. `text`:
    if the logits are adjusted."""

    row: Row
    law: Law
    first: int
    round_key: tuple[int, int, int]
    most: int
    left: int
    text: Text | None = None

    @property
    def drafted(self) -> int:
        return len(self.row.token_ids) - 1

    @property
    def stop(self) -> int:
        """The most tokens that have keys and values when the next row has run: it needs pages for them."""
        return min(self.row.stop + 1 + self.most, self.row.start + 2 + self.left)


class _Decided(NamedTuple):
    """Of each row int64 [rows, 3 + _MOST_IDS]: how many draft tokens were accepted, the token after them, the depth of
    what the board has for that, and its ids. The `report` is for the host."""

    rows: Tensor
    report: Tensor


def _layout() -> RoundLayout:
    """Where the kernels find what they read."""
    numbers, ids, low, high = accumulate(_SIZES[:-1])
    entry = board.KEY.start, board.DEPTH, board.CHECKSUM, board.IDS, MAX_LOOKAHEAD, board.SALT
    return RoundLayout(numbers, ids, low, high, _MOST_IDS, *entry)


class DeviceScheduler:
    """Launches verifications on `runner`, at most one behind the one that the host waits for."""

    def __init__(self, runner: StaticRunner, board: DeviceBoard) -> None:
        device = runner.model.device
        self._runner, self._board = runner, board
        self._most_rows = max(shape.rows for shape in runner.steps)
        self._rows = Upload((self._most_rows, sum(_SIZES)), torch.int64, device)
        self._tokens = torch.zeros(max(shape.tokens for shape in runner.steps), dtype=torch.int64, device=device)
        self._running = self._tokens[:0]
        cuda = device.type == "cuda"
        self._report = torch.zeros(len(self._tokens) + self._most_rows * (3 + _MOST_IDS), dtype=torch.int64)
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
        """Run, or capture, everything once, with no rows."""
        captured = GraphPool(self._rows.device.device).capture if capture else once
        self._decide = captured(self._decide)
        self._decide()  # what is captured next reads what this leaves
        if self._runner.adjustments is not None:
            self._note_outcomes = captured(self._note_outcomes)
        self._build = {shape: captured(build) for shape, build in self._build.items()}

    # -- what the host asks for ----------------------------------------------------------------------------------------

    def launch(self, rows: Items[Row], laws: Items[Law], texts: Items[Text | None] = ()) -> bool:
        """Start a verification of which nothing runs yet; False where it has no static shape."""
        tokens = self._runner.launch(rows, laws, texts)
        if tokens is not None:
            self._running = tokens
        return tokens is not None

    def shape(self, rows: Items[int]) -> GraphShape | None:
        """The shape for rows of at most so many tokens."""
        return smallest_fitting(rows, self._runner.steps)

    @torch.inference_mode()
    def launch_next(self, rows: Items[FollowedRow], shape: GraphShape) -> None:
        """Start the verification behind the one that runs, of which it follows `rows`; other rows end with that one.

        It fits `shape`, and the rows have pages up to their `stop`."""
        size, step = self._runner.cache.page_size, self._runner.steps[shape]
        self._runner.tables.tell((each.row.slot, each.row.pages[: -(-each.stop // size)]) for each in rows)
        table = self._runner.adjustments if any(each.text for each in rows) else None
        if table is not None:
            table.tell((each.row.slot, each.text) for each in rows)
        self._fill(rows)
        self._tokens[: len(self._running)].copy_(self._running)
        if any(each.most for each in rows):
            self._board.fetch(1 + max(each.row.slot for each in rows))
        self._decide()
        self._report.copy_(self._decided.report, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
        if table is not None:
            self._note_outcomes()
        self._build[shape]()
        step.run()
        self._running = step.tokens(drawing_of(each.law for each in rows), table is not None)

    def report(self, rows: int) -> tuple[list[int], list[Cached]]:
        """Wait for the verification before the one that runs. Returns the samples of all its tokens, and the draft
        tokens that each of its `rows` followed rows took from the board; entry -1 where there were none."""
        if self._arrived is not None:
            self._arrived.synchronize()
        samples, looked_up = self._report.split((len(self._tokens), self._most_rows * (3 + _MOST_IDS)))
        entries = looked_up.view(self._most_rows, -1)[:rows].tolist()
        drafts = [Cached(entry, ids[:depth]) for entry, depth, _, *ids in entries]
        self._board.reader.rejected += sum(unsound for _, _, unsound, *_ in entries)
        return read_ids(samples, self._board.reader.vocab_size), drafts

    def samples(self) -> list[int]:
        """Wait for the verification that runs, and return the samples of all its tokens."""
        tokens: list[int] = read_ids(self._running, self._board.reader.vocab_size)
        return tokens

    def _fill(self, rows: Items[FollowedRow]) -> None:
        self._rows.wait()
        host = self._rows.host
        host[:] = 0
        for words, each in zip(host, rows, strict=False):
            row, known = each.row, 4 + _NUMBERS
            words[:4] = *each.round_key, row.start + 1
            words[4 : known - 4] = row.slot, each.first, each.drafted, each.most, each.left, row.start, 1
            words[known : known + each.drafted] = row.token_ids[1:]
            if each.law.temperature > 0.0:
                after = Row(range(each.drafted + each.most + 1), row.start + 1, row.pages)
                low, high, (inverse, *_), (top_k, *_), (top_p, *_), (min_p, *_) = zip(
                    *draws_of(after, each.law), strict=True
                )
                words[known - 3] = top_k
                words[known - 4 : known].view("float64")[[0, 2, 3]] = inverse, top_p, min_p
                keys = words[known + _MOST_IDS :].reshape(2, _PLACES)
                keys[:, : len(low)] = low, high
        self._rows.send()

    # -- what the device does ------------------------------------------------------------------------------------------

    def _make_decision(self) -> None:
        """Outcomes of the verification whose samples are in `_tokens`, and what the board has for them."""
        if fuses(self._rows.device.device):
            from ssd.kernels.triton_rounds import decide

            self._decided = _Decided(*decide(self._rows.device, self._tokens, *self._board.words, layout=_layout()))
            return
        round_key, numbers, ids, _, _ = self._rows.device.split(_SIZES, dim=1)
        slot, first, drafted, most, left, *_ = numbers.T
        places = first[:, None] + torch.arange(LONGEST_ROW, device=ids.device)
        own = self._tokens[places.clamp(max=len(self._tokens) - 1)]
        accepted, token = coupled_rows(ids, drafted, own)
        token = torch.where((token >= 0) & (token < self._board.reader.vocab_size), token, -1)
        found = self._board.find(slot, torch.cat((round_key, accepted[:, None], token[:, None]), dim=1))
        depth = torch.minimum(found.depth, torch.minimum(most, left - accepted - 1).clamp(min=0))
        found = found._replace(depth=depth, ids=found.ids[:, :_MOST_IDS])
        looked_up = torch.stack((found.entry, found.depth, found.unsound), dim=1)
        report = torch.cat((self._tokens, torch.cat((looked_up, found.ids), dim=1).flatten()))
        rows = torch.cat((torch.stack((accepted, token, found.depth), dim=1), found.ids), dim=1)
        self._decided = _Decided(rows, report)

    def _add_to_texts(self) -> None:
        """Tell what adjusts the next logits of the outcomes, which the host has not seen."""
        table = self._runner.adjustments
        assert table is not None
        if fuses(self._rows.device.device):
            from ssd.kernels.triton_adjustment import note_outcomes

            note_outcomes(self._rows.device, self._decided.rows, table.words, NUMBERS, _layout())
            return
        _, numbers, ids, _, _ = self._rows.device.split(_SIZES, dim=1)
        accepted, token = self._decided.rows[:, :2].T[..., None]
        place = torch.arange(LONGEST_ROW, device=ids.device)
        drafts = torch.nn.functional.pad(ids, (0, 1), value=-1)
        found = torch.where(place < accepted, drafts, torch.where(place == accepted, token, -1))
        slot = torch.where(numbers[:, 6] > 0, numbers[:, 0], len(table.words) - 1)
        table.words[slot, NUMBERS:] = found.int()

    def _make_batch(self, step: Step) -> None:
        """The tensors that `ssd.execution.tables.BatchTensors.fill` would write, of what was decided."""
        (_, tokens, longest), tables, device = step.shape, self._runner.tables, self._rows.device
        rows = min(step.shape.rows, self._most_rows)
        if fuses(device.device):
            from ssd.kernels.triton_rounds import build

            size, dummy = self._runner.cache.page_size, (tables.dummy, tables.dummy_page)
            whole = tokens, step.batch.rows, longest
            fields = dict(step.batch.fields)
            build(device[:rows], self._decided.rows[:rows], tables.tensor, fields, whole, size, dummy, _layout())
            return
        _, numbers, _, low, high = (part[:rows] for part in device.split(_SIZES, dim=1))
        slot, _, _, _, _, begun, active, *draw_numbers = numbers.T
        (accepted, token, depth), found = self._decided.rows[:rows, :3].T, self._decided.rows[:rows, 3:]
        ends = ((1 + depth) * active).cumsum(0)
        starts = torch.cat((torch.zeros_like(ends[:1]), ends))
        place = torch.arange(tokens, device=device.device)
        live = place < ends[-1]
        row = torch.searchsorted(ends, place, right=True).clamp(max=rows - 1)
        offset = torch.where(live, place - starts[row], 0)
        position = torch.where(live, begun[row] + accepted[row] + 1 + offset, 0)
        # A sample that is no token has no next one; the host finds out.
        next_ids = torch.cat((token.clamp(min=0)[:, None], found), dim=1)
        size = self._runner.cache.page_size
        pages = tables.tensor[slot[row], position // size].long()
        draw = row, accepted[row] + offset
        spare = torch.arange(step.batch.rows - rows + 1, device=device.device) * longest
        values = {
            "ids": torch.where(live, next_ids[row, offset], 0),
            "positions": position,
            "slots": torch.where(live, pages * size + position % size, tables.dummy_page * size),
            "low": low[draw],
            "high": high[draw],
            **{name: torch.where(live, own[row], 0) for name, own in zip(Draw._fields[2:], draw_numbers, strict=True)},
            "starts": torch.cat((starts[:-1], (ends[-1] + spare).clamp(max=tokens))),
            "sequences": torch.cat((slot, torch.full_like(spare[1:], tables.dummy))),
        }
        for name, field in step.batch.fields.items():
            field.copy_(values[name])


class _RunningRow(NamedTuple):
    """A row of the verification that runs: its draft tokens, and where its tokens begin in the batch."""

    sequence: Sequence
    drafts: Cached
    first: int


class OverlappedVerification:
    """Keeps at most one verification behind the one that the engine waits for, none of more than `max_tokens` tokens.

    `plain` runs what cannot be followed, while `policy` says that overlap pays."""

    def __init__(
        self, plain: PlainVerification, device: DeviceScheduler, ask: Ask, max_tokens: int, policy: OverlapPolicy
    ) -> None:
        self._plain, self._device, self._ask = plain, device, ask
        self._max_tokens, self._policy = max_tokens, policy
        self._running: list[_RunningRow] = []
        self._overlapped = False  # whether the last verification was launched behind another one
        self._ended = 0.0  # when the one before it did

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
        """Forget the verification that runs: it began with tokens that are not to be."""
        self._running, self._overlapped = [], False

    def learn(self, verified: VerifiedBatch, results: Items[Result | None]) -> None:
        between_s, self._ended = verified.began - self._ended, verified.ended
        decoded = [result for result in results if result is not None and result.round > 0]
        if len(decoded) < len(results) or undrafted(result.sequence.speculation.mode for result in decoded):
            return
        for result in decoded:
            self._policy.note_row(result.cache == "hit", result.outcome.accepted + 1, self._overlapped)
        if not self._overlapped:
            self._policy.note_round(verified.ended - verified.began, between_s)

    def _run(self, batch: list[Scheduled], running: int, host_work: Task) -> VerifiedBatch | None:
        """Verify a batch on the device, and launch the next one behind it where that can be done; None for a new batch
        that cannot be followed."""
        began = self._ended if self._overlapped else time.perf_counter()
        lengths = [len(part.row.token_ids) for part in batch]
        firsts = [row.first for row in self._running] or _starts(lengths)
        allowed = len(batch) == running and self._policy.allows(part.sequence.speculation.mode for part in batch)
        laws = laws_of(batch, adjusted=True) if allowed else None
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
        return VerifiedBatch(batch, samples, NO_LOGITS, began, time.perf_counter(), in_flight)

    def _followed(
        self, batch: Items[Scheduled], laws: Items[Law], firsts: Items[int], texts: Items[Text | None]
    ) -> list[FollowedRow]:
        """The rows as the device is told of them; none where the host must see an outcome first."""
        rows: list[FollowedRow] = []
        for part, law, first, text in zip(batch, laws, firsts, texts or [None] * len(batch), strict=True):
            sequence = part.sequence
            decodes = part.complete and len(part.row.token_ids) == part.sampled and sequence.round > 0
            asked = self._ask(sequence) if decodes and sequence.acceptable > 0 else None
            if asked is None:
                return []
            epoch, most = asked
            round_key = epoch, sequence.request, sequence.round
            most = min(most, _MOST_IDS)
            rows.append(FollowedRow(part.row, law, first, round_key, most, sequence.acceptable, text))
        if sum(1 + row.most for row in rows) > self._max_tokens:
            return []
        try:
            for part, row in zip(batch, rows, strict=True):
                part.sequence.table.grow(row.stop)
        except OutOfPages:
            return []
        return rows


def _starts(lengths: Items[int]) -> list[int]:
    """Where rows of these lengths begin, one after the other."""
    return list(accumulate(lengths, initial=0))[:-1]


def overlapped(plain: PlainVerification, config: EngineConfig, board: BoardReader, ask: Ask) -> Verification:
    """An `OverlappedVerification` for a target on a GPU whose verifications have static shapes; elsewhere `plain`.

    It stays plain for a draft that reads hidden states too, as the next forward overwrites them, for several ranks,
    of which the host tells each what is run next, and where the environment has SSD_OVERLAP=0. The board's memory is
    locked only for a draft, which writes to it."""
    runner = plain.runner
    cuda = runner.model.device.type == "cuda"
    alone = config.features is None and config.tensor_parallel_size == 1
    wanted = os.environ.get("SSD_OVERLAP") != "0"
    if not wanted or not isinstance(runner, StaticRunner) or not cuda or not alone:
        return plain
    if config.has_draft and not page_locked(board):
        return plain
    device = DeviceScheduler(runner, DeviceBoard(board, runner.model.device))
    return OverlappedVerification(plain, device, ask, config.max_num_batched_tokens, OverlapPolicy())
