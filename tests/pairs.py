"""Few combinations of parameters in which every two values meet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations, one value of each factor, so that every two values of different factors are in one of them.

    A fault that needs two values to meet is found as by the full product. Greedy: the combination with most new pairs
    comes next, and the first of these where several have as many."""
    every = [tuple(enumerate(chosen)) for chosen in product(*(range(len(factor)) for factor in factors))]
    missing = {pair for chosen in every for pair in combinations(chosen, 2)}
    found = []
    while missing:
        best = max(every, key=lambda chosen: sum(pair in missing for pair in combinations(chosen, 2)))
        missing -= set(combinations(best, 2))
        found.append(tuple(factors[factor][value] for factor, value in best))
    return found
