"""States in place of keys and values (states.c), in float32 on a CPU; `ssd.layers.recurrent` says what they are."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import byref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssd.kernels.cpu import check
from ssd.kernels.library import MAX_WINDOW, CDelta, Changes, Convolution, address, call, pointer, scratch

Rows = Sequence[tuple[int, Sequence[int], int, int, int, int, int]]
"""`StateRow` of `ssd.layers.recurrent`: (source, replayed, tokens, target, written, save, saved) of each row."""


class _Packed(NamedTuple):
    rows: array[int]
    entries: array[int]
    slot: int
    place: int
    tokens: int


_last: tuple[Any, _Packed] = (None, _Packed(array("q"), array("q"), -1, -1, 0))


def _packed(rows: Rows) -> _Packed:
    """Return the packed rows; those of the last call again if all layers of a forward pass the same tuple."""
    global _last
    if type(rows) is tuple and rows is _last[0]:
        return _last[1]
    numbers, entries, tokens, least = array("q"), array("q"), 0, 0
    for source, replayed, count, target, written, save, saved in rows:
        numbers.extend((source, len(replayed), count, target, written, save, saved))
        entries.extend(replayed)
        least = min((least, source + 1, target + 1, save + 1, count, *replayed))
        entries.extend(range(-1 - tokens, -1 - tokens - count, -1))
        tokens += count
    if least < 0:
        raise IndexError("a negative slot, place or number of tokens")
    slots = (slot for row in rows for slot in (row[0], row[3], row[5]))
    packed = _Packed(numbers, entries, max(slots, default=-1), max(entries, default=-1), tokens)
    _last = rows, packed
    return packed


def _changes(packed: _Packed, states: Tensor, kept: Tensor, changes: Tensor) -> Changes:
    for tensor in (states, kept, changes):
        check(tensor)
        if not tensor.is_contiguous():
            raise ValueError("states and changes must be contiguous")
    if packed.slot >= len(states) or packed.place >= len(kept) or packed.tokens != len(changes):
        raise IndexError(
            f"slot {packed.slot} of {len(states)}, place {packed.place} of {len(kept)}, or {packed.tokens} tokens of "
            f"{len(changes)}"
        )
    if kept.shape[1:] != changes.shape[1:]:
        raise ValueError(f"changes {list(changes.shape)} beside {list(kept.shape)}")
    rows, entries = packed.rows, packed.entries
    return Changes(
        kept.data_ptr(),
        changes.data_ptr(),
        changes.shape[1],
        address(entries),
        len(entries),
        address(rows),
        len(rows) // 7,
    )


def convolve(
    states: Tensor, kept: Tensor, changes: Tensor, rows: Rows, weight: Tensor, bias: Tensor | None, silu: bool
) -> Tensor:
    """Convolve inputs `changes` [n, channels] by `weight` [window, channels] -> [n, channels].

    `states` are [slots, window - 1, channels]."""
    changes, (window, channels) = changes.contiguous(), weight.shape
    if window > MAX_WINDOW or states.shape[1:] != (window - 1, channels) or changes.shape[1] != channels:
        raise ValueError(
            f"states {list(states.shape)} and inputs {list(changes.shape)} for weights {list(weight.shape)}"
        )
    packed, y = _packed(rows), torch.empty(changes.shape, dtype=torch.float32)
    of = Convolution(_changes(packed, states, kept, changes), states.data_ptr(), weight.data_ptr(), pointer(bias))
    of.y, of.channels, of.window, of.silu = y.data_ptr(), channels, window, silu
    call().convolve(byref(of))
    return y


def gated_delta(
    states: Tensor,
    kept: Tensor,
    changes: Tensor,
    queries: Tensor,
    rows: Rows,
    decay: Tensor,
    dt_bias: Tensor,
    tiled: bool = False,
) -> Tensor:
    """Update `states` [slots, heads, key_dim, value_dim] by `changes` and read -> [n, heads * value_dim].

    `queries` are [n, key_heads * key_dim], `decay` and `dt_bias` [heads]."""
    changes, (heads, key_dim, value_dim) = changes.contiguous(), states.shape[1:]
    queries, keys = queries if queries.stride(1) == 1 else queries.contiguous(), queries.shape[1]
    check(queries)
    if keys % key_dim or heads % (keys // key_dim) or {decay.shape, dt_bias.shape} != {(heads,)}:
        raise ValueError(f"queries {list(queries.shape)} of states {list(states.shape)}")
    if changes.shape[1] != keys + heads * value_dim + 2 * heads or len(queries) != len(changes):
        raise ValueError(f"changes {list(changes.shape)} and queries {list(queries.shape)}")
    packed, y = _packed(rows), torch.empty(len(changes), heads * value_dim, dtype=torch.float32)
    memory = scratch(4 * len(packed.entries) * 2 * (keys + heads))
    of = CDelta(_changes(packed, states, kept, changes), states.data_ptr(), queries.data_ptr(), queries.stride(0))
    of.decay, of.dt_bias, of.y, of.prepared = (part.data_ptr() for part in (decay, dt_bias, y, memory))
    of.heads, of.key_heads, of.key_dim, of.value_dim = heads, keys // key_dim, key_dim, value_dim
    of.tiled = tiled
    call().gated_delta(byref(of))
    return y
