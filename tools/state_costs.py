"""Time two ways to roll back a recurrent state: `python -m tools.state_costs [K]`.

One makes the changes of accepted tokens again on the way to the next outputs, the other keeps a state after every token
of a verification. Layers are gated delta rules of Qwen3.5's sizes, in memory one behind the other as in a model."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from statistics import median

import torch

from ssd.layers.recurrent import GatedDelta, StateRow

LAYERS, HEADS, DIM = 18, 16, 128
_REPEATS = 30


def seconds(rows: Sequence[StateRow], slots: int) -> float:
    """Return the median time of a forward's recurrences over these rows, with `slots` states a layer."""
    tokens, delta = sum(row.tokens for row in rows), GatedDelta(-torch.rand(HEADS), torch.randn(HEADS), HEADS, DIM, DIM)
    states = [torch.randn(slots, *delta.size.state) for _ in range(LAYERS)]
    kept, changes = torch.randn(64, delta.size.change), torch.randn(tokens, delta.size.change)
    queries, times = torch.randn(tokens, HEADS * DIM), []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        for state in states:
            delta(state, kept, changes, queries, rows)
        times.append(time.perf_counter() - began)
    return median(times)


def main() -> None:
    most = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    size = LAYERS * HEADS * DIM * DIM * 4
    plain = seconds((StateRow(0, (), 1, 0, 1),), 1)
    print(f"{size / 2**20:.1f} MiB of states a sequence; a token of `ar` {1e3 * plain:.2f} ms")
    for accepted in range(most + 1):
        again = seconds((StateRow(0, range(accepted + 1), most + 1, 0, accepted + 1),), 1)
        print(f"K {most}, {accepted} accepted before: {1e3 * again:.2f} ms, {size / 2**20:.1f} MiB written")
    copies = seconds(tuple(StateRow(token, (), 1, token + 1, 1) for token in range(most + 1)), most + 2)
    written = (most + 1) * size / 2**20
    print(f"K {most}, a state kept after every token: {1e3 * copies:.2f} ms, {written:.1f} MiB written")


if __name__ == "__main__":
    main()
