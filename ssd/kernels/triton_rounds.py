"""Triton kernels of the functions in `ssd.kernels.rounds`, which a device computes between two verifications."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssd.kernels.rounds import EntryLayout, RowLayout


@triton.jit
def decide_kernel(
    rows: tl.tensor,
    tokens: tl.tensor,
    board: tl.tensor,
    weights: tl.tensor,
    decided: tl.tensor,
    report: tl.tensor,
    row_words: int,
    count: int,
    vocabulary: int,
    ENTRIES: tl.constexpr,
    WORDS: tl.constexpr,
    NUMBERS: tl.constexpr,
    IDS: tl.constexpr,
    MOST: tl.constexpr,
    KEY: tl.constexpr,
    DEPTH: tl.constexpr,
    CHECKSUM: tl.constexpr,
    ENTRY_IDS: tl.constexpr,
    LOOKAHEAD: tl.constexpr,
    SALT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    mine = rows + row * row_words
    slot = tl.load(mine + NUMBERS)
    first = tl.load(mine + NUMBERS + 1)
    drafted = tl.load(mine + NUMBERS + 2)
    most = tl.load(mine + NUMBERS + 3)
    left = tl.load(mine + NUMBERS + 4)

    m = tl.arange(0, BLOCK_M)
    draft = tl.load(mine + IDS + m, mask=m < MOST, other=-1)
    places = tl.minimum(first + m, count - 1)
    own = tl.load(tokens + places)
    right = (draft == own) & (m < drafted) & (m < MOST)
    accepted = tl.min(tl.where(right, MOST, m), 0).to(tl.int64)
    token = tl.sum(tl.where(m == accepted, own, 0), 0)
    token = tl.where((token >= 0) & (token < vocabulary), token, -1)

    e = tl.arange(0, BLOCK_E)
    w = tl.arange(0, BLOCK_W)
    real = (e < ENTRIES)[:, None] & (w < WORDS)[None, :]
    block = tl.load(board + (slot * ENTRIES + e[:, None]) * WORDS + w[None, :], mask=real, other=0)
    version = tl.sum(tl.where(w[None, :] == 0, block, 0), 1)
    depth = tl.sum(tl.where(w[None, :] == DEPTH, block, 0), 1)
    is_key = (w >= KEY) & (w < KEY + 6)
    key = tl.load(mine + w - KEY, mask=(w >= KEY) & (w < KEY + 4), other=0)
    key = tl.where(w == KEY + 4, accepted, tl.where(w == KEY + 5, token, key))
    other = tl.sum((is_key[None, :] & (block != key[None, :])).to(tl.int32), 1)
    is_id = (w >= ENTRY_IDS) & (w < WORDS)
    bad = is_id[None, :] & ((block < 0) | (block >= vocabulary)) & ((w - ENTRY_IDS)[None, :] < depth[:, None])
    shifted = (block >> 29) & 0x7FFFFFFFF
    mixed = (block ^ shifted) * tl.load(weights + w, mask=w < WORDS, other=0)[None, :]
    stored = tl.sum(tl.where(w[None, :] == CHECKSUM, block, 0), 1)
    sound = (depth >= 0) & (depth <= LOOKAHEAD) & (tl.sum(bad.to(tl.int32), 1) == 0)
    sound = sound & ((tl.sum(mixed, 1) ^ SALT) == stored)
    answers = (version != 0) & (other == 0) & (e < ENTRIES)
    entry = tl.min(tl.where(answers & sound, e, ENTRIES), 0)
    unsound = tl.sum((answers & (sound == 0)).to(tl.int32), 0)
    hit = entry < ENTRIES
    taken = tl.minimum(entry, ENTRIES - 1)
    depth = tl.sum(tl.where(e == taken, depth, 0), 0)
    depth = tl.where(hit, tl.minimum(depth, tl.minimum(most, tl.maximum(left - accepted - 1, 0))), 0)
    # Read again: a block's row cannot be shifted.
    ids = tl.load(board + (slot * ENTRIES + taken) * WORDS + ENTRY_IDS + m, mask=m < MOST, other=0)

    out = decided + row * (3 + MOST)
    tl.store(out, accepted)
    tl.store(out + 1, token)
    tl.store(out + 2, depth)
    tl.store(out + 3 + m, ids, mask=m < MOST)
    told = report + count + row * (3 + MOST)
    tl.store(told, tl.where(hit, entry, -1).to(tl.int64))
    tl.store(told + 1, depth)
    tl.store(told + 2, unsound.to(tl.int64))
    tl.store(told + 3 + m, ids, mask=m < MOST)
    for start in range(0, count, BLOCK_E):  # each row copies all samples: they are few
        at = start + e
        tl.store(report + at, tl.load(tokens + at, mask=at < count, other=0), mask=at < count)


def decide(
    rows: Tensor, tokens: Tensor, board: Tensor, weights: Tensor, vocabulary: int, row: RowLayout, entry: EntryLayout
) -> tuple[Tensor, Tensor]:
    count, (_, entries, words) = len(tokens), board.shape
    decided = torch.empty(len(rows), 3 + row.most, dtype=torch.int64, device=rows.device)
    report = torch.empty(count + decided.numel(), dtype=torch.int64, device=rows.device)
    decide_kernel[(len(rows),)](
        rows, tokens, board, weights, decided, report, rows.stride(0), count, vocabulary,
        ENTRIES=entries, WORDS=words, NUMBERS=row.numbers, IDS=row.ids, MOST=row.most,
        KEY=entry.key, DEPTH=entry.depth, CHECKSUM=entry.checksum, ENTRY_IDS=entry.ids,
        LOOKAHEAD=entry.lookahead, SALT=entry.salt,
        BLOCK_E=triton.next_power_of_2(entries), BLOCK_W=triton.next_power_of_2(words),
        BLOCK_M=triton.next_power_of_2(row.most + 1), num_warps=4,
    )  # fmt: skip
    return decided, report


@triton.jit
def begin_draft_kernel(
    rows: tl.tensor,
    decided: tl.tensor,
    drafted: tl.tensor,
    work: tl.tensor,
    row_words: int,
    known: int,
    NUMBERS: tl.constexpr,
    IDS: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    mine, at = rows + row * row_words, row * WORDS
    verified = tl.load(mine + NUMBERS + 2)
    most = tl.load(mine + NUMBERS + 3)
    left = tl.load(mine + NUMBERS + 4)
    accepted = tl.load(decided + at)
    token = tl.load(decided + at + 1)
    depth = tl.where(token < 0, 0, tl.minimum(most, tl.maximum(left - accepted - 1, 0)))
    whole = ((accepted == verified) & (verified > 0)).to(tl.int64)
    last = tl.load(mine + IDS + tl.maximum(accepted - 1, 0))
    tl.store(drafted + at, accepted)
    tl.store(drafted + at + 1, token)
    tl.store(drafted + at + 2, depth)
    last = tl.where(last < known, last, 0)
    token = tl.where(token < known, token, 0)
    tl.store(work + at, accepted - whole)
    tl.store(work + at + 1, tl.where(whole > 0, last, token))
    tl.store(work + at + 2, tl.where(depth > 0, whole, -1))
    tl.store(work + at + 3, token)


def begin_draft(rows: Tensor, decided: Tensor, drafted: Tensor, work: Tensor, known: int, row: RowLayout) -> None:
    sizes = {"NUMBERS": row.numbers, "IDS": row.ids, "WORDS": 3 + row.most}
    begin_draft_kernel[(len(rows),)](rows, decided, drafted, work, rows.stride(0), known, **sizes, num_warps=1)


@triton.jit
def go_on_drafting_kernel(
    drafted: tl.tensor, work: tl.tensor, tokens: tl.tensor, starts: tl.tensor, vocabulary: int, WORDS: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = row * WORDS
    accepted = tl.load(drafted + at)
    depth = tl.load(drafted + at + 2)
    behind = tl.load(work + at + 2)
    place = tl.load(work + at) + behind - accepted
    live = behind >= 0
    found = tl.load(tokens + tl.maximum(tl.load(starts + row + 1) - 1, 0))
    found = tl.where((found >= 0) & (found < vocabulary), found, 0)
    tl.store(drafted + at + 3 + place, found, mask=live)
    tl.store(work + at, accepted + place + 1)
    tl.store(work + at + 1, found)
    tl.store(work + at + 2, tl.where(live & (place + 1 < depth), 0, -1).to(tl.int64))


def go_on_drafting(drafted: Tensor, work: Tensor, tokens: Tensor, starts: Tensor, vocabulary: int) -> None:
    words = drafted.shape[1]
    go_on_drafting_kernel[(len(work),)](drafted, work, tokens, starts, vocabulary, WORDS=words, num_warps=1)


_FIELDS = "ids", "positions", "slots", "low", "high", "laws", "starts", "sequences"


@triton.jit
def build_kernel(
    rows: tl.tensor,
    decided: tl.tensor,
    table: tl.tensor,
    ids: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    laws: tl.tensor,
    starts: tl.tensor,
    sequences: tl.tensor,
    row_words: int,
    table_stride: int,
    count: int,
    tokens: int,
    batch_rows: int,
    longest: int,
    dummy: int,
    dummy_page: int,
    PAGE: tl.constexpr,
    NUMBERS: tl.constexpr,
    LAW: tl.constexpr,
    IDS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> None:
    r = tl.arange(0, BLOCK_R)
    known = r < count
    depth = tl.load(decided + r * (3 + MOST) + 2, mask=known, other=0)
    active = tl.load(rows + r * row_words + NUMBERS + 6, mask=known, other=0)
    lengths = (1 + depth) * active
    ends = tl.cumsum(lengths, 0)
    total = tl.sum(lengths, 0)

    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = t < tokens
    live = (t < total) & inside
    before = known[None, :] & (ends[None, :] <= t[:, None])
    row = tl.minimum(tl.sum(before.to(tl.int64), 1), count - 1)
    start = tl.max(tl.where(before, ends[None, :], 0), 1)
    offset = tl.where(live, t - start, 0)
    mine = rows + row * row_words
    outcome = decided + row * (3 + MOST)
    accepted = tl.load(outcome, mask=live, other=0)
    position = tl.where(live, tl.load(mine + NUMBERS + 5, mask=live, other=0) + accepted + 1 + offset, 0)
    # A sample that is no token is replaced by id 0; the host finds out later.
    token = tl.maximum(tl.load(outcome + 1, mask=live, other=0), 0)
    drafted = tl.load(outcome + 2 + offset, mask=live & (offset > 0), other=0)
    slot = tl.load(mine + NUMBERS, mask=live, other=0)
    page = tl.load(table + slot * table_stride + position // PAGE, mask=live, other=0).to(tl.int64)
    draw = accepted + offset
    tl.store(ids + t, tl.where(live, tl.where(offset > 0, drafted, token), 0), mask=inside)
    tl.store(positions + t, position, mask=inside)
    tl.store(slots + t, tl.where(live, page * PAGE + position % PAGE, dummy_page * PAGE), mask=inside)
    tl.store(low + t, tl.load(mine + LOW + draw, mask=live, other=0), mask=inside)
    tl.store(high + t, tl.load(mine + HIGH + draw, mask=live, other=0), mask=inside)
    for number in tl.static_range(IDS - LAW):
        tl.store(laws + number * tokens + t, tl.load(mine + LAW + number, mask=live, other=0), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(starts + r, ends - lengths, mask=known)
        tl.store(sequences + r, tl.load(rows + r * row_words + NUMBERS, mask=known, other=0), mask=known)
        for begin in range(count, batch_rows + 1, BLOCK_R):
            spare = begin + r
            where = tl.minimum(total + (spare - count) * longest, tokens)
            tl.store(starts + spare, where, mask=spare <= batch_rows)
            tl.store(sequences + spare, (spare * 0 + dummy).to(tl.int64), mask=spare < batch_rows)


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
    tokens, batch_rows, longest = sizes
    block = min(128, triton.next_power_of_2(tokens))
    build_kernel[(triton.cdiv(tokens, block),)](
        rows,
        decided,
        table,
        *(fields[name] for name in _FIELDS),
        rows.stride(0),
        table.stride(0),
        len(rows),
        tokens,
        batch_rows,
        longest,
        *dummy,
        PAGE=page,
        NUMBERS=row.numbers,
        LAW=row.law,
        IDS=row.ids,
        LOW=row.low,
        HIGH=row.high,
        MOST=row.most,
        BLOCK_R=triton.next_power_of_2(len(rows)),
        BLOCK_T=block,
        num_warps=4,
    )
