"""The recurrences of `ssd.layers.recurrent` on a GPU, by Triton.

A program has some channels of a state, for the rows that share slots, in order: so a row sees what an earlier one has
written. It goes through changes one by one, so that a token's bits do not depend on how a text was cut."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ssd.kernels.states import Rows

_FIELDS = 9  # of a row: those of `StateRow`, where its places and its tokens begin
_CHANNELS = 256  # of a program of a convolution
_COLUMNS = 32  # of a head's state in a program


class _DeviceRows(NamedTuple):
    """The rows of a batch on a device, int64: their fields, places, and where each group of rows begins."""

    rows: Tensor
    places: Tensor
    groups: Tensor


_last: tuple[Any, _DeviceRows | None] = (None, None)


def _packed(rows: Rows, device: torch.device) -> _DeviceRows:
    # The last call's again if all layers of a forward pass the same tuple.
    global _last
    if _last[1] is not None and rows is _last[0] and _last[1].rows.device == device:
        return _last[1]
    fields, places, token = list[list[int]](), list[int](), 0
    for source, replayed, count, target, written, save, saved in rows:
        fields.append([source, len(replayed), count, target, written, save, saved, len(places), token])
        places += replayed
        token += count
    order, starts = _grouped(rows)
    numbers = [number for row in order for number in fields[row]] + places + starts
    sent = torch.tensor(numbers, dtype=torch.long)
    sent = (sent.pin_memory() if device.type == "cuda" else sent).to(device, non_blocking=True)
    packed = _DeviceRows(*sent.split((_FIELDS * len(fields), len(places), len(starts))))
    _last = rows, packed
    return packed


def _grouped(rows: Rows) -> tuple[list[int], list[int]]:
    """Return the numbers of the rows by groups that share a slot, and where each group begins, and the end."""
    groups: list[tuple[set[int], list[int]]] = []
    for number, (source, _, _, target, _, save, _) in enumerate(rows):
        slots, members = {slot for slot in (source, target, save) if slot >= 0}, [number]
        for group in [group for group in groups if group[0] & slots]:
            groups.remove(group)
            slots, members = slots | group[0], group[1] + members
        groups.append((slots, members))
    starts = [0]
    for _, members in groups:
        starts.append(starts[-1] + len(members))
    return [number for _, members in groups for number in members], starts


# Numbers of a batch, in one tensor: where they begin depends on its size.
_ANYWHERE = ["places", "groups"]


@triton.jit(do_not_specialize=["channels"], do_not_specialize_on_alignment=_ANYWHERE)
def convolve_kernel(
    states: tl.tensor,
    kept: tl.tensor,
    changes: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    places: tl.tensor,
    groups: tl.tensor,
    channels: int,
    changes_stride: int,
    FIELDS: tl.constexpr,
    WINDOW: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    offset = 0.0
    if BIAS:
        offset = tl.load(bias + channel, mask=inside, other=0.0)
    for number in range(tl.load(groups + tl.program_id(1)), tl.load(groups + tl.program_id(1) + 1)):
        row = rows + number * FIELDS
        source, replayed, tokens = tl.load(row), tl.load(row + 1), tl.load(row + 2)
        first = places + tl.load(row + 7)
        start = tl.load(row + 8)
        for token in range(tokens):
            total = tl.zeros((BLOCK,), tl.float32)
            for tap in tl.static_range(WINDOW):
                x = _input(
                    states, kept, changes, changes_stride, source, replayed, first, start,
                    replayed + token - (WINDOW - 1) + tap, channel, inside, channels, WINDOW,
                )  # fmt: skip
                total += x * tl.load(weight + tap * channels + channel, mask=inside, other=0.0)
            total += offset
            if SILU:
                total = total / (1.0 + tl.exp(-total))
            tl.store(out + (start + token) * channels + channel, total, mask=inside)
        # The saved state first: writing to the target may change the source.
        for field in tl.static_range(5, 2, -2):
            slot, done = tl.load(row + field), tl.load(row + field + 1)
            if slot >= 0:
                for place in tl.static_range(WINDOW - 1):
                    x = _input(
                        states, kept, changes, changes_stride, source, replayed, first, start,
                        done - (WINDOW - 1) + place, channel, inside, channels, WINDOW,
                    )  # fmt: skip
                    tl.store(states + (slot * (WINDOW - 1) + place) * channels + channel, x, mask=inside)


@triton.jit
def _input(
    states: tl.tensor,
    kept: tl.tensor,
    changes: tl.tensor,
    changes_stride: int,
    source: int,
    replayed: int,
    first: tl.tensor,
    start: int,
    index: int,
    channel: tl.tensor,
    inside: tl.tensor,
    channels: int,
    WINDOW: tl.constexpr,
) -> tl.tensor:
    # Inputs before the first are in the state that the row begins from.
    before = inside & (index < 0) & (source >= 0)
    old = tl.load(states + (source * (WINDOW - 1) + index + (WINDOW - 1)) * channels + channel, mask=before, other=0.0)
    earlier = (index >= 0) & (index < replayed)
    place = tl.load(first + index, mask=earlier, other=0)
    again = tl.load(kept + place * channels + channel, mask=inside & earlier, other=0.0)
    is_new = inside & (index >= replayed)
    new = tl.load(changes + (start + index - replayed) * changes_stride + channel, mask=is_new, other=0.0)
    return old + again + new.to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=_ANYWHERE)
def delta_kernel(
    states: tl.tensor,
    kept: tl.tensor,
    changes: tl.tensor,
    queries: tl.tensor,
    decay: tl.tensor,
    dt_bias: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    places: tl.tensor,
    groups: tl.tensor,
    changes_stride: int,
    queries_stride: int,
    FIELDS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    head = tl.program_id(0)
    i, j = tl.arange(0, BLOCK_K), tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_keys, in_values = i < KEY_DIM, j < VALUE_DIM
    both = in_keys[:, None] & in_values[None, :]
    keys = KEY_HEADS * KEY_DIM
    values = keys + HEADS * VALUE_DIM
    key = (head % KEY_HEADS if TILED else head // (HEADS // KEY_HEADS)) * KEY_DIM + i
    value = keys + head * VALUE_DIM + j
    size = HEADS * KEY_DIM * VALUE_DIM
    at = states + head * KEY_DIM * VALUE_DIM + i[:, None] * VALUE_DIM + j[None, :]
    rate, step = tl.load(decay + head), tl.load(dt_bias + head)
    for number in range(tl.load(groups + tl.program_id(2)), tl.load(groups + tl.program_id(2) + 1)):
        row = rows + number * FIELDS
        source, replayed, tokens = tl.load(row), tl.load(row + 1), tl.load(row + 2)
        target, written = tl.load(row + 3), tl.load(row + 4)
        save, saved = tl.load(row + 5), tl.load(row + 6)
        first, start = places + tl.load(row + 7), tl.load(row + 8)
        state = tl.load(at + source * size, mask=both & (source >= 0), other=0.0)
        if (target >= 0) & (written == 0):
            tl.store(at + target * size, state, mask=both)
        if (save >= 0) & (saved == 0):
            tl.store(at + save * size, state, mask=both)
        for done in range(1, replayed + tokens + 1):
            is_new = done > replayed
            place = tl.load(first + done - 1, mask=done <= replayed, other=0)
            token = tl.maximum(start + done - 1 - replayed, 0)
            old, new = kept + place * (values + 2 * HEADS), changes + token * changes_stride
            k = _either(old + key, new + key, is_new, in_keys)
            v = _either(old + value, new + value, is_new, in_values)
            b = _either(old + values + head, new + values + head, is_new, True)
            a = _either(old + values + HEADS + head, new + values + HEADS + head, is_new, True) + step
            k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
            softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
            state = state * tl.exp(rate * softplus)
            u = (v - tl.sum(state * k[:, None], 0)) / (1.0 + tl.exp(-b))
            state += k[:, None] * u[None, :]
            if is_new:
                q = tl.load(queries + token * queries_stride + key, mask=in_keys, other=0.0).to(tl.float32)
                q = q * (tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * (KEY_DIM**-0.5))
                read = tl.sum(state * q[:, None], 0)
                tl.store(out + (token * HEADS + head) * VALUE_DIM + j, read, mask=in_values)
            if (target >= 0) & (written == done):
                tl.store(at + target * size, state, mask=both)
            if (save >= 0) & (saved == done):
                tl.store(at + save * size, state, mask=both)


@triton.jit
def _either(old: tl.tensor, new: tl.tensor, is_new: tl.tensor, inside: tl.tensor) -> tl.tensor:
    return tl.load(old, mask=inside & (not is_new), other=0.0) + tl.load(new, mask=inside & is_new, other=0.0).to(
        tl.float32
    )


def convolve(
    states: Tensor, kept: Tensor, changes: Tensor, rows: Rows, weight: Tensor, bias: Tensor | None, silu: bool
) -> Tensor:
    packed, (window, channels) = _packed(rows, states.device), weight.shape
    changes = changes if changes.stride(1) == 1 else changes.contiguous()
    out = changes.new_empty(changes.shape)
    convolve_kernel[-(-channels // _CHANNELS), len(packed.groups) - 1](
        states,
        kept,
        changes,
        weight,
        weight if bias is None else bias,
        out,
        *packed,
        channels,
        changes.stride(0),
        FIELDS=_FIELDS,
        WINDOW=window,
        BIAS=bias is not None,
        SILU=silu,
        BLOCK=_CHANNELS,
    )
    return out


def gated_delta(
    states: Tensor,
    kept: Tensor,
    changes: Tensor,
    queries: Tensor,
    rows: Rows,
    decay: Tensor,
    dt_bias: Tensor,
    tiled: bool,
) -> Tensor:
    packed, (heads, key_dim, value_dim) = _packed(rows, states.device), states.shape[1:]
    changes, queries = (x if x.stride(1) == 1 else x.contiguous() for x in (changes, queries))
    out = changes.new_empty(len(changes), heads * value_dim)
    columns = min(_COLUMNS, triton.next_power_of_2(value_dim))
    delta_kernel[heads, -(-value_dim // columns), len(packed.groups) - 1](
        states,
        kept,
        changes,
        queries,
        decay,
        dt_bias,
        out,
        *packed,
        changes.stride(0),
        queries.stride(0),
        FIELDS=_FIELDS,
        HEADS=heads,
        KEY_HEADS=queries.shape[1] // key_dim,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        TILED=tiled,
        BLOCK_K=triton.next_power_of_2(key_dim),
        BLOCK_V=columns,
    )
    return out
