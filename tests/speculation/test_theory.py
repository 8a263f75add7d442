"""The paper's formulas at values worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.speculation.theory import (
    expected_tokens,
    expected_tokens_by_position,
    speedup_sd,
    speedup_ssd,
)
from tools.simulate.closed_form import speedup_of_batch

shares = st.floats(0.01, 1)
times = st.floats(0, 3)


@pytest.mark.parametrize(
    ("acceptance", "depth", "tokens"),
    [(0.5, 0, 1.0), (0.5, 1, 1.5), (0.5, 3, 1.875), (0.8, 2, 2.44), (0.0, 4, 1.0), (1.0, 4, 5.0)],
)
def test_expected_tokens(acceptance: float, depth: int, tokens: float) -> None:
    assert expected_tokens(acceptance, depth) == pytest.approx(tokens)


@given(st.floats(0, 0.99), st.integers(0, 16))
def test_expected_tokens_is_the_closed_form(acceptance: float, depth: int) -> None:
    """Leviathan et al., eq. 1."""
    closed = (1 - acceptance ** (depth + 1)) / (1 - acceptance)
    assert expected_tokens(acceptance, depth) == pytest.approx(closed)


@pytest.mark.parametrize(
    ("hit_rate", "tokens_hit", "tokens_miss", "fill", "backup", "speedup"),
    [
        (1.0, 4.0, 1.0, 0.5, 9.0, 4.0),  # the tree hides behind the verification
        (1.0, 4.0, 1.0, 2.0, 9.0, 2.0),  # it does not: every round takes as long as the tree
        (0.0, 4.0, 3.0, 9.0, 0.5, 2.0),  # always the backup
        (0.8, 4.0, 2.0, 0.5, 0.25, 3.6 / 1.05),
        (0.8, 4.0, 2.0, 1.5, 0.25, 3.6 / 1.45),
        (0.88, 5.68, 4.01, 0.9, 0.0, 5.4796),  # the public re-run's lengths (ALGORITHM 4), nothing lost to waiting
    ],
)
def test_theorem_7(
    hit_rate: float, tokens_hit: float, tokens_miss: float, fill: float, backup: float, speedup: float
) -> None:
    assert speedup_ssd(hit_rate, tokens_hit, tokens_miss, fill, backup) == pytest.approx(speedup)


@pytest.mark.parametrize(("tokens", "draft", "speedup"), [(3.0, 0.0, 3.0), (3.0, 0.5, 2.0), (1.0, 1.0, 0.5)])
def test_ordinary_speculative_decoding(tokens: float, draft: float, speedup: float) -> None:
    assert speedup_sd(tokens, draft) == pytest.approx(speedup)


def test_tokens_by_position() -> None:
    """One rate serves every position, a list its own; a depth between two is between their tokens."""
    assert expected_tokens_by_position((0.8,), 5) == pytest.approx(expected_tokens(0.8, 5))
    assert expected_tokens_by_position((0.5, 0.4), 3) == pytest.approx(1 + 0.5 + 0.2 + 0.08)
    assert expected_tokens_by_position((0.5, 0.4), 1.25) == pytest.approx(1 + 0.5 + 0.05)
    assert expected_tokens_by_position((0.5,), 0) == 1


@given(shares, st.floats(1, 9), shares, st.floats(1, 9), st.floats(0, 1), times)
def test_corollary_9(hit_rate: float, hit: float, share: float, plain: float, fill: float, draft: float) -> None:
    """Bounds of ssd/sd for a tree that fits into a verification and a backup that costs nothing."""
    miss = max(1.0, hit * share)
    ratio = speedup_ssd(hit_rate, hit, miss, fill, backup=0.0) / speedup_sd(plain, draft)
    most = (1 + draft) * hit / plain
    assert most * hit_rate * (1 - 1e-9) <= ratio <= most * (1 + 1e-9)


@given(shares, st.floats(1, 9), st.floats(1, 9), times, times)
def test_corollary_16_begins_with_theorem_7(p: float, hit: float, miss: float, fill: float, backup: float) -> None:
    alone = speedup_ssd(p, hit, miss, fill, backup)
    assert speedup_of_batch(p, hit, miss, fill, backup, 1) == pytest.approx(alone)
    if 1 + backup >= max(1.0, fill):
        assert speedup_of_batch(p, hit, miss, fill, backup, 9) <= alone * (1 + 1e-9)
