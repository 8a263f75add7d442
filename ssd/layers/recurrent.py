"""Recurrences: layers that keep a state for a sequence in place of keys and values.

A token leaves its *change*, the numbers from which it can be made again: the state after any token is an earlier state
and the changes since then, in order. So the rollback of a rejected token costs nothing, and a state has the same bits
however its tokens were cut into batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.kernels import cpu
from ssd.kernels import states as kernels
from ssd.kernels.gpu import fuses


class StateSize(NamedTuple):
    state: tuple[int, ...]
    change: int


class StateRow(NamedTuple):
    """A row of a batch, as a recurrence sees it: earlier changes are made again, then those of `tokens` new tokens.

    The state begins as that in slot `source`, or as zeros. Earlier changes lie at the places `replayed`. After
    `written` changes, earlier ones included, the state goes to slot `target`; after `saved` changes to slot `save`. A
    slot -1 is none."""

    source: int
    replayed: Sequence[int]
    tokens: int
    target: int = -1
    written: int = 0
    save: int = -1
    saved: int = 0


class Recurrence(Protocol):
    size: StateSize

    def __call__(
        self, states: Tensor, kept: Tensor, changes: Tensor, queries: Tensor, rows: Sequence[StateRow]
    ) -> Tensor:
        """Return the outputs [n, out] of a batch, whose new tokens have `changes` [n, change] and `queries` [n, read].

        `states` [slots, *state] in float32 and `kept` [places, change] are of earlier batches; the caller keeps the new
        changes. A row sees what an earlier row has written. A token's output is that of the state after its own change.
        """


def _begin(states: Tensor, row: StateRow) -> Tensor:
    # Nobody may write to it.
    return states[row.source] if row.source >= 0 else states.new_zeros(states.shape[1:])


def _keep(states: Tensor, row: StateRow, done: int, state: Tensor) -> None:
    if row.target >= 0 and done == row.written:
        states[row.target] = state
    if row.save >= 0 and done == row.saved:
        states[row.save] = state


class ShortConvolution:
    """A causal convolution of each channel over the last few tokens, with a bias or without, and perhaps a SiLU.

    The state is the inputs [window - 1, channels] before the next token, a change a token's input [channels]; `queries`
    are empty. The weights are [channels, window], the oldest token's first."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, silu: bool = False) -> None:
        self._weight, self._silu = weight.float().t().contiguous(), silu
        self._bias = None if bias is None else bias.float()
        self.size = StateSize((weight.shape[1] - 1, weight.shape[0]), weight.shape[0])

    def __call__(
        self, states: Tensor, kept: Tensor, changes: Tensor, queries: Tensor, rows: Sequence[StateRow]
    ) -> Tensor:
        if cpu.serve(changes):
            return kernels.convolve(states, kept, changes, rows, self._weight, self._bias, self._silu)
        if fuses(states.device):
            from ssd.layers import triton_states

            return triton_states.convolve(states, kept, changes, rows, self._weight, self._bias, self._silu)
        before, out = self.size.state[0], torch.empty_like(changes)
        for row, start in _starts(rows):
            new = changes[start : start + row.tokens]
            seen = torch.cat((_begin(states, row), kept[list(row.replayed)].float(), new.float()))
            for done in range(len(seen) - before + 1):
                _keep(states, row, done, seen[done : done + before])
            out[start : start + row.tokens] = self._convolved(seen[len(row.replayed) :])
        return out

    def _convolved(self, seen: Tensor) -> Tensor:
        count = len(seen) - self.size.state[0]
        total = seen[:count] * self._weight[0]
        for place, weight in enumerate(self._weight[1:], 1):
            total = total + seen[place : place + count] * weight
        total = total if self._bias is None else total + self._bias
        if not self._silu:
            return total
        # On a CPU torch computes the last few numbers of a tensor in another way: so each token is a tensor of its own.
        parts = total.split(1) if total.is_cpu else (total,)
        return torch.cat([F.silu(part) for part in parts])


class GatedDelta:
    """The gated delta rule (Yang, Kautz, Hatamizadeh, arXiv 2412.06464), a state [key_dim, value_dim] for each head.

    A token's state is S <- e^g S + k u^T, where u = sigmoid(b) (v - e^g S^T k), g = `decay` * softplus(a + `dt_bias`),
    and its output S^T q; `decay` < 0 and `dt_bias` are [value heads]. Keys and queries are divided by their length,
    queries also by sqrt(key_dim). Consecutive heads of values share a head of keys and queries; with `tiled`, heads
    that are `key_heads` apart do. A change is (k, v, b, a); `queries` are q."""

    def __init__(
        self, decay: Tensor, dt_bias: Tensor, key_heads: int, key_dim: int, value_dim: int, tiled: bool = False
    ) -> None:
        self._decay, self._dt_bias = decay.float(), dt_bias.float()
        heads, self._key_heads, self._tiled = len(decay), key_heads, tiled
        self._parts = key_heads * key_dim, heads * value_dim, heads, heads
        self.size = StateSize((heads, key_dim, value_dim), sum(self._parts))

    def __call__(
        self, states: Tensor, kept: Tensor, changes: Tensor, queries: Tensor, rows: Sequence[StateRow]
    ) -> Tensor:
        if cpu.serve(changes):
            return kernels.gated_delta(states, kept, changes, queries, rows, self._decay, self._dt_bias, self._tiled)
        if fuses(states.device):
            from ssd.layers import triton_states

            known = self._decay, self._dt_bias, self._tiled
            return triton_states.gated_delta(states, kept, changes, queries, rows, *known)
        out = changes.new_empty(len(changes), self._parts[1])
        for row, start in _starts(rows):
            state, earlier = _begin(states, row), len(row.replayed)
            for done in range(earlier + row.tokens + 1):
                if done:
                    token = start + done - 1 - earlier
                    state = self._changed(state, changes[token] if done > earlier else kept[row.replayed[done - 1]])
                    if done > earlier:
                        out[token] = self._read(state, queries[token])
                _keep(states, row, done, state)
        return out

    def _changed(self, state: Tensor, change: Tensor) -> Tensor:
        heads, _, value_dim = self.size.state
        keys, values, b, a = change.float().split(self._parts)
        keys = self._normalised(keys)
        state = state * (self._decay * F.softplus(a + self._dt_bias)).exp()[:, None, None]
        news = (values.view(heads, value_dim) - (state * keys).sum(1)) * b.sigmoid()[:, None]
        return state + keys * news[:, None]

    def _read(self, state: Tensor, queries: Tensor) -> Tensor:
        return (state * (self._normalised(queries.float()) * self.size.state[1] ** -0.5)).sum(1).flatten()

    def _normalised(self, x: Tensor) -> Tensor:
        x = x.view(self._key_heads, -1)
        x = x * ((x * x).sum(-1, keepdim=True) + 1e-6).rsqrt()
        group = self.size.state[0] // self._key_heads
        return (x.repeat(group, 1) if self._tiled else x.repeat_interleave(group, 0))[..., None]


def _starts(rows: Sequence[StateRow]) -> Iterator[tuple[StateRow, int]]:
    yield from zip(rows, accumulate((row.tokens for row in rows), initial=0), strict=False)


def sigmoid_mul(gate: Tensor, x: Tensor) -> Tensor:
    return cpu.sigmoid_mul(gate, x) if cpu.serve(x) else gate.sigmoid() * x
