"""Times of the suffix memory's store: a token added, a search, and bytes a token, by the tokens that it has.

\b
    python -m tools.suffix_store --tokens 10000 --tokens 1000000

Texts of 1,000 tokens with Zipf's frequencies fill the store. Then one is written again, token by token (known), one is
new (new), and two are hostile: a single token again and again, and two tokens at random. An addition and a search are
one call from Python each. longest: the slowest of all calls, with what else the machine did.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import click
import numpy as np

from ssd.bench.outputs import console, grid
from ssd.kernels.suffixes import SuffixStore
from ssd.system.version import described

_LENGTH, _VOCABULARY, _ASKED, _COUNT, _BYTES = 1000, 50_000, 2000, 16, 21


def zipf(dice: np.random.Generator, count: int) -> list[int]:
    """Return random tokens by Zipf's law: a few are frequent."""
    found: list[int] = (dice.zipf(1.2, count) % _VOCABULARY).tolist()
    return found


def timed(store: SuffixStore, tokens: Sequence[int]) -> tuple[list[float], list[float], int]:
    """Write a text token by token; return the seconds of additions and of searches, and how many found something."""
    text, added, searched, found = store.text(1), list[float](), list[float](), 0
    for token in tokens:
        began = time.perf_counter()
        text.extend([token])
        between = time.perf_counter()
        found += text.find(_COUNT) is not None
        added.append(between - began)
        searched.append(time.perf_counter() - between)
    return added, searched, found


@click.command(help=__doc__)
@click.option("--tokens", "sizes", type=click.IntRange(1000), multiple=True, default=(10_000, 10**6, 10**7))
def main(sizes: tuple[int, ...]) -> None:
    dice, rows = np.random.default_rng(0), []
    for size in sizes:
        store = SuffixStore(_BYTES * size)
        written = zipf(dice, size)
        began = time.perf_counter()
        for start in range(0, size, _LENGTH):
            store.text(1).extend(written[start : start + _LENGTH])
        filled = (time.perf_counter() - began) / size
        first = int(dice.integers(size // _LENGTH)) * _LENGTH
        texts = {
            "known": written[first : first + _LENGTH],
            "new": zipf(dice, _ASKED),
            "one token": [7] * _ASKED,
            "two tokens": dice.integers(0, 2, _ASKED).tolist(),
        }
        for name, tokens in texts.items():
            added, searched, found = timed(store, tokens)
            us = [f"{1e6 * seconds:.2f}" for seconds in (filled, median(added), median(searched))]
            longest = f"{1e6 * max(*added, *searched):.0f}"
            bytes_a_token = f"{_BYTES * size / store.capacity:.1f}"
            rows.append((f"{size:,}", bytes_a_token, name, *us, longest, f"{found / len(tokens):.0%}"))
    columns = ("tokens", "bytes each", "text", "in bulk, us", "add, us", "search, us", "longest, us", "found")
    console().print(grid(described(), columns, rows, left=3))


if __name__ == "__main__":
    main()
