"""The work of a device between two verifications: find the outcomes of the first, write the batch of the next.

All numbers are integers, so the Triton kernels of the same names give equal results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.kernels.gpu import fused


class RowLayout(NamedTuple):
    """Offsets of fields in the words of a row: the key and the base come first.

    `numbers` are: slot, first sample, draft tokens, most draft tokens of the next row, draft tokens that still can be
    accepted, start, 1 if used. `law` are the bits of its law's numbers (`ssd.law.DRAWN`), float64. `ids` are its draft
    tokens, at most `most`; `low` and `high` the halves of its noise keys."""

    numbers: int
    law: int
    ids: int
    low: int
    high: int
    most: int


class EntryLayout(NamedTuple):
    """Offsets of fields in the words of a board's entry, whose version comes first; its most ids, and the salt."""

    key: int
    depth: int
    checksum: int
    ids: int
    lookahead: int
    salt: int


def coupled_rows(speculations: Tensor, drafted: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Find the accepted lengths and bonus tokens of n rows, both [n] (`ssd.speculation.acceptance.coupled`).

    A row uses `drafted` [n] of its `speculations` [n, K] and one more of `own` [n, K + 1]."""
    places = torch.arange(speculations.shape[1], device=own.device)
    right = (speculations == own[:, :-1]) & (places < drafted[:, None])
    accepted = right.long().cumprod(-1).sum(-1)
    return accepted, own.gather(1, accepted[:, None])[:, 0]


def look_up(
    board: Tensor, weights: Tensor, vocabulary: int, slots: Tensor, keys: Tensor, entry: EntryLayout
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Look up outcomes `keys` int64 [rows, 6] at `slots` int64 [rows] of a `board` int64 [slots, entries, words].

    Returns an entry's number (-1 on a miss), its depth, the number of damaged entries for the outcome, each [rows], and
    the ids [rows, lookahead]; ids beyond the depth mean nothing. `weights` are the checksum's."""
    rows = board[slots]
    depths, ids = rows[..., entry.depth], rows[..., entry.ids :]
    places = torch.arange(entry.lookahead, device=rows.device)
    valid = (ids >= 0) & (ids < vocabulary) | (places >= depths[..., None])
    # Signed words wrap as the board's unsigned ones do. The version and the checksum have weight 0.
    mixed = (rows ^ ((rows >> 29) & (2**35 - 1))) * weights
    sound = (depths >= 0) & (depths <= entry.lookahead) & valid.all(-1)
    sound &= (mixed.sum(-1) ^ entry.salt) == rows[..., entry.checksum]
    answers = (rows[..., 0] != 0) & (rows[..., entry.key : entry.key + 6] == keys[:, None]).all(-1)
    count = rows.shape[1]
    number = torch.where(answers & sound, torch.arange(count, device=rows.device), count).amin(-1)
    taken, missed = number.clamp(max=count - 1)[:, None], number == count
    depth = depths.gather(1, taken)[:, 0].masked_fill(missed, 0)
    ids = ids.gather(1, taken[..., None].expand(-1, -1, entry.lookahead))[:, 0]
    return number.masked_fill(missed, -1), depth, (answers & ~sound).sum(-1), ids


@fused
def decide(
    rows: Tensor, tokens: Tensor, board: Tensor, weights: Tensor, vocabulary: int, row: RowLayout, entry: EntryLayout
) -> tuple[Tensor, Tensor]:
    """Find the outcomes of rows int64 [n, any] among the samples of all `tokens` int64 [count], and look them up.

    Returns `decided` int64 [n, 3 + most]: accepted draft tokens, the token after them, depth of the entry, its ids; and
    a report for the host: `tokens`, and for each row entry, depth, unsound entries and ids."""
    numbers, drafts = rows[:, row.numbers : row.law], rows[:, row.ids : row.low]
    slot, first, drafted, most, left = numbers.T[:5]
    places = first[:, None] + torch.arange(row.most + 1, device=rows.device)
    accepted, token = coupled_rows(drafts, drafted, tokens[places.clamp(max=len(tokens) - 1)])
    token = torch.where((token >= 0) & (token < vocabulary), token, -1)
    keys = torch.cat((rows[:, : row.numbers], accepted[:, None], token[:, None]), dim=1)
    number, depth, unsound, ids = look_up(board, weights, vocabulary, slot, keys, entry)
    depth, ids = torch.minimum(depth, torch.minimum(most, (left - accepted - 1).clamp(min=0))), ids[:, : row.most]
    report = torch.cat((tokens, torch.cat((torch.stack((number, depth, unsound), dim=1), ids), dim=1).flatten()))
    return torch.cat((torch.stack((accepted, token, depth), dim=1), ids), dim=1), report


@fused
def begin_draft(rows: Tensor, decided: Tensor, drafted: Tensor, work: Tensor, known: int, row: RowLayout) -> None:
    """Begin to draft behind the outcomes `decided` of n rows, with a draft on the target's device.

    `drafted` int64 [n, 3 + most] gets accepted draft tokens, the token after them, and the number of draft tokens that
    the next row may have. `work`, which `build` reads as if it were `decided`, gets the draft's first row: its place
    behind the row of `rows`, less one, and the token after the accepted ones; before it the last draft token if all
    were accepted, as the draft has not read that. Depth -1: no draft token. Ids that are not `known` to the draft
    become 0."""
    numbers, ids = rows[:, row.numbers : row.law], rows[:, row.ids : row.low]
    _, _, verified, most, left = numbers.T[:5]
    accepted, token = decided[:, :2].T
    depth = torch.minimum(most, (left - accepted - 1).clamp(min=0)).masked_fill(token < 0, 0)
    whole = (accepted == verified) & (verified > 0)
    last = ids.gather(1, (accepted - 1).clamp(min=0)[:, None])[:, 0]
    drafted[:, :3] = torch.stack((accepted, token, depth), dim=1)
    last, token = (torch.where(each < known, each, 0) for each in (last, token))
    first = accepted - whole.long(), torch.where(whole, last, token), torch.where(depth > 0, whole.long(), -1), token
    work[:, :4] = torch.stack(first, dim=1)


@fused
def go_on_drafting(drafted: Tensor, work: Tensor, tokens: Tensor, starts: Tensor, vocabulary: int) -> None:
    """Add to `drafted` what a forward over the rows of `work` sampled, and make the next forward's `work` of it.

    `tokens` int64 [count] are the samples after all tokens, `starts` [n + 1 or more] where rows begin among them. An id
    outside the vocabulary becomes 0, a wrong guess."""
    accepted, _, depth = drafted[:, :3].T
    place, live = work[:, 0] + work[:, 2] - accepted, work[:, 2] >= 0
    found = tokens[(starts[1 : len(work) + 1] - 1).clamp(min=0)]
    found = torch.where((found >= 0) & (found < vocabulary), found, 0)
    here = live[:, None] & (torch.arange(drafted.shape[1] - 3, device=work.device) == place[:, None])
    drafted[:, 3:] = torch.where(here, found[:, None], drafted[:, 3:])
    further = torch.where(live & (place + 1 < depth), 0, -1)
    work[:, :3] = torch.stack((accepted + place + 1, found, further), dim=1)


@fused
def note_outcomes(rows: Tensor, decided: Tensor, words: Tensor, at: int, row: RowLayout) -> None:
    """Write each row's accepted ids, the token after them, and -1 into words[slot, at:], int32.

    The last slot is for rows that are not used."""
    numbers, drafts = rows[:, row.numbers : row.law], F.pad(rows[:, row.ids : row.low], (0, 1), value=-1)
    accepted, token = decided[:, :2].T[..., None]
    place = torch.arange(row.most + 1, device=rows.device)
    found = torch.where(place < accepted, drafts, torch.where(place == accepted, token, -1))
    slot = torch.where(numbers[:, 6] > 0, numbers[:, 0], len(words) - 1)
    words[slot, at:] = found.int()


@fused
def build(
    rows: Tensor,
    decided: Tensor,
    table: Tensor,
    fields: Mapping[str, Tensor],
    sizes: tuple[int, int, int],
    page: int,
    dummy: tuple[int, int],
    row: RowLayout,
) -> None:
    """Write the next batch into its `fields`, as `ssd.execution.tables.BatchTensors.fill` would.

    `sizes`: tokens, rows, tokens of the longest row. `table` int32 [sequences, pages]; `dummy`: the table's row for
    padding, and the page in it."""
    (tokens, batch_rows, longest), count = sizes, len(rows)
    law, low, high = rows[:, row.law : row.ids], rows[:, row.low : row.high], rows[:, row.high :]
    slot, _, _, _, _, begun, active = rows[:, row.numbers : row.law].T
    (accepted, token, depth), ids = decided[:, :3].T, decided[:, 3:]
    ends = ((1 + depth) * active).cumsum(0)
    starts = torch.cat((torch.zeros_like(ends[:1]), ends))
    place = torch.arange(tokens, device=rows.device)
    live = place < ends[-1]
    own = torch.searchsorted(ends, place, right=True).clamp(max=count - 1)
    offset = torch.where(live, place - starts[own], 0)
    position = torch.where(live, begun[own] + accepted[own] + 1 + offset, 0)
    # A sample that is no token is replaced by id 0; the host finds out later.
    next_ids = torch.cat((token.clamp(min=0)[:, None], ids), dim=1)
    pages = table[slot[own], position // page].long()
    draw = own, accepted[own] + offset
    spare = torch.arange(batch_rows - count + 1, device=rows.device) * longest
    values = {
        "ids": torch.where(live, next_ids[own, offset], 0),
        "positions": position,
        "slots": torch.where(live, pages * page + position % page, dummy[1] * page),
        "low": low[draw],
        "high": high[draw],
        "laws": torch.where(live, law[own].T, 0),
        "starts": torch.cat((starts[:-1], (ends[-1] + spare).clamp(max=tokens))),
        "sequences": torch.cat((slot, torch.full_like(spare[1:], dummy[0]))),
    }
    for name, field in fields.items():
        field.copy_(values[name])
