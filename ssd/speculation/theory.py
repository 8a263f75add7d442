"""What the paper predicts (arXiv 2603.03251), as functions of measured values."""

from __future__ import annotations


def expected_tokens(acceptance: float, depth: int) -> float:
    """Tokens of a round that verifies `depth` draft tokens, each accepted with probability `acceptance`: the geometric
    sum 1 + a + ... + a^depth (Leviathan et al., arXiv 2211.17192, eq. 1)."""
    return sum(acceptance**i for i in range(depth + 1))


def speedup_ssd(hit_rate: float, tokens_hit: float, tokens_miss: float, fill: float, backup: float) -> float:
    """Theorem 7: speed of `ssd` over `ar`. `fill` (T_p) and `backup` (T_b) are in units of one verification."""
    tokens = hit_rate * tokens_hit + (1 - hit_rate) * tokens_miss
    time = hit_rate * max(1.0, fill) + (1 - hit_rate) * (1 + backup)
    return tokens / time


def speedup_sd(tokens: float, draft: float) -> float:
    """Speed of ordinary speculative decoding over `ar`: E_sd / (1 + T_sd), `draft` in units of one verification."""
    return tokens / (1 + draft)
