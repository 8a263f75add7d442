"""Verifications one behind the other on the device: the next one's input is made of what this one finds and of what the
draft has prepared for that, while the host is still told of it.

The host says what it knows of each row (`Link`), launches, and reads one report. All of it has fixed shapes; where
there is a GPU it is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ssd.execution.batch import Row
from ssd.execution.graphs import Recorder, once
from ssd.execution.rooms import LONGEST_ROW, Room, fitting
from ssd.execution.static import StaticRunner, Step, draws_of
from ssd.execution.tables import Upload
from ssd.ipc.board import Cached
from ssd.ipc.device_board import DeviceBoard, Found
from ssd.speculation.acceptance import coupled_rows
from ssd.speculation.sampling import Law

MOST_IDS = LONGEST_ROW - 1  # draft tokens of a row
_PLACES = 2 * LONGEST_ROW  # positions that two verifications can reach
# Of a link: three words of the key and the base, numbers of `_NUMBERS`, ids, halves of the noise's keys.
_NUMBERS = 8
_SIZES = (4, _NUMBERS, MOST_IDS, _PLACES, _PLACES)


class Link(NamedTuple):
    """A row, one committed token and draft tokens, that another is to follow.

    `first` is where its tokens begin in the batch, and `asks` the epoch, request and round of its outcome. The next row
    may have `most` draft tokens, and of both rows' `left` could be accepted before the text is as long as it may be.
    """

    row: Row
    law: Law
    first: int
    asks: tuple[int, int, int]
    most: int
    left: int

    @property
    def drafted(self) -> int:
        return len(self.row.token_ids) - 1

    @property
    def stop(self) -> int:
        """The most tokens that the next row may reach, and needs pages for."""
        return min(self.row.stop + 1 + self.most, self.row.start + 2 + self.left)


class _Decided(NamedTuple):
    accepted: Tensor
    token: Tensor
    found: Found
    report: Tensor


class Chain:
    """Launches verifications on `runner`; one at most is behind the one that the host waits for."""

    def __init__(self, runner: StaticRunner, board: DeviceBoard) -> None:
        device = runner.model.device
        self._runner, self._board = runner, board
        self._most_rows = max(room.rows for room in runner.steps)
        self._links = Upload((self._most_rows, sum(_SIZES)), torch.int64, device)
        self._tokens = torch.zeros(max(room.tokens for room in runner.steps), dtype=torch.int64, device=device)
        self._running = self._tokens[:0]
        cuda = device.type == "cuda"
        self._told = torch.zeros(len(self._tokens) + self._most_rows * (3 + MOST_IDS), dtype=torch.int64)
        self._told = self._told.pin_memory() if cuda else self._told
        self._arrived = torch.cuda.Event() if cuda else None
        self._decide: Callable[[], None] = self._make_decision
        self._build: dict[Room, Callable[[], None]] = {
            room: partial(self._make_batch, step) for room, step in runner.steps.items()
        }
        self._warm_up(cuda and runner.capture)

    @torch.inference_mode()
    def _warm_up(self, capture: bool) -> None:
        """Run, or record, everything once: of links of no rows."""
        record = Recorder(self._links.device.device).record if capture else once
        self._decide = record(self._decide)
        self._decide()  # what is recorded next reads what this leaves
        self._build = {room: record(build) for room, build in self._build.items()}

    # -- what the host asks for ----------------------------------------------------------------------------------------

    def launch(self, rows: Sequence[Row], laws: Sequence[Law]) -> bool:
        """Start a verification of which nothing runs yet; False where it has no static shape."""
        tokens = self._runner.launch(rows, laws)
        if tokens is not None:
            self._running = tokens
        return tokens is not None

    def room(self, rows: Sequence[int]) -> Room | None:
        """The shape for rows of at most so many tokens."""
        return fitting(rows, self._runner.steps)

    @torch.inference_mode()
    def follow(self, links: Sequence[Link], room: Room) -> None:
        """Start the verification after the one that runs, whose rows are `links`. It fits `room`, and the rows have
        pages as far as it may reach; rows of the one that runs that have no link end with it."""
        size, step = self._runner.cache.page_size, self._runner.steps[room]
        self._runner.tables.tell((link.row.slot, link.row.pages[: -(-link.stop // size)]) for link in links)
        self._fill(links)
        self._tokens[: len(self._running)].copy_(self._running)
        self._board.fetch(1 + max(link.row.slot for link in links))
        self._decide()
        self._told.copy_(self._decided.report, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
        self._build[room]()
        step.run()
        self._running = step.tokens(all(link.law.temperature == 0.0 for link in links))

    def report(self, rows: int) -> tuple[list[int], list[Cached]]:
        """Of the verification before the one that runs the samples of all tokens, and what each of the so many rows
        that were followed took from the board: entry -1 where there was nothing. Waits for it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        told, count = self._told.tolist(), len(self._tokens)
        entries = [told[start : start + 3 + MOST_IDS] for start in range(count, len(told), 3 + MOST_IDS)][:rows]
        taken = [Cached(entry, ids[:depth]) for entry, depth, _, *ids in entries]
        self._board.reader.rejected += sum(unsound for _, _, unsound, *_ in entries)
        return told[:count], taken

    def last(self) -> list[int]:
        """The samples of all tokens of the verification that runs; waits for it."""
        tokens: list[int] = self._running.tolist()
        return tokens

    def _fill(self, links: Sequence[Link]) -> None:
        self._links.wait()
        host = self._links.host
        host[:] = 0
        for words, link in zip(host, links, strict=False):
            row, known = link.row, 4 + _NUMBERS
            words[:4] = *link.asks, row.start + 1
            words[4:known] = row.slot, link.first, link.drafted, link.most, link.left, row.start, 1, 0
            words[known : known + link.drafted] = row.token_ids[1:]
            if link.law.temperature > 0.0:
                after = Row(range(link.drafted + link.most + 1), row.start + 1, row.pages)
                low, high, inverse = zip(*draws_of(after, link.law), strict=True)
                words[known - 1 : known].view("float64")[:] = inverse[0]
                keys = words[known + MOST_IDS :].reshape(2, _PLACES)
                keys[:, : len(low)] = low, high
        self._links.send()

    # -- what the device does ------------------------------------------------------------------------------------------

    def _make_decision(self) -> None:
        """Outcomes of the verification whose samples are in `_tokens`, and what the board has for them."""
        asks, numbers, ids, _, _ = self._links.device.split(_SIZES, dim=1)
        slot, first, drafted, most, left, *_ = numbers.T
        places = first[:, None] + torch.arange(LONGEST_ROW, device=ids.device)
        own = self._tokens[places.clamp(max=len(self._tokens) - 1)]
        accepted, token = coupled_rows(ids, drafted, own)
        found = self._board.find(slot, torch.cat((asks, accepted[:, None], token[:, None]), dim=1))
        depth = torch.minimum(found.depth, torch.minimum(most, left - accepted - 1).clamp(min=0))
        found = found._replace(depth=depth, ids=found.ids[:, :MOST_IDS])
        taken = torch.stack((found.entry, found.depth, found.unsound), dim=1)
        report = torch.cat((self._tokens, torch.cat((taken, found.ids), dim=1).flatten()))
        self._decided = _Decided(accepted, token, found, report)

    def _make_batch(self, step: Step) -> None:
        """The tensors that `ssd.execution.tables.BatchTensors.fill` would write, of what was decided."""
        (_, tokens, longest), tables, device = step.room, self._runner.tables, self._links.device
        rows = min(step.room.rows, self._most_rows)
        _, numbers, _, low, high = (part[:rows] for part in device.split(_SIZES, dim=1))
        slot, _, _, _, _, begun, active, inverse = numbers.T
        accepted, token, found, _ = self._decided
        accepted, token = accepted[:rows], token[:rows]
        ends = ((1 + found.depth[:rows]) * active).cumsum(0)
        starts = torch.cat((torch.zeros_like(ends[:1]), ends))
        place = torch.arange(tokens, device=device.device)
        live = place < ends[-1]
        row = torch.searchsorted(ends, place, right=True).clamp(max=rows - 1)
        offset = torch.where(live, place - starts[row], 0)
        position = torch.where(live, begun[row] + accepted[row] + 1 + offset, 0)
        # A sample that is no number has no next token; the host finds out.
        chain = torch.cat((token.clamp(min=0)[:, None], found.ids[:rows]), dim=1)
        size = self._runner.cache.page_size
        pages = tables.tensor[slot[row], position // size].long()
        draw = row, accepted[row] + offset
        spare = torch.arange(step.batch.rows - rows + 1, device=device.device) * longest
        values = {
            "ids": torch.where(live, chain[row, offset], 0),
            "positions": position,
            "slots": torch.where(live, pages * size + position % size, tables.dummy_page * size),
            "low": low[draw],
            "high": high[draw],
            "inverse": torch.where(live, inverse[row], 0),
            "starts": torch.cat((starts[:-1], (ends[-1] + spare).clamp(max=tokens))),
            "sequences": torch.cat((slot, torch.full_like(spare[1:], tables.dummy))),
        }
        for name, field in step.batch.fields.items():
            field.copy_(values[name])
