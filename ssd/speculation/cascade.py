"""How far a smaller draft should guess for a larger one, which verifies its guesses before it publishes them.

A cascade is speculative decoding of the draft itself (Chen et al., arXiv 2312.11462, "vertical cascade"). Its levels
share the noise of the sampler, so that a token is accepted when it is the larger draft's own: what that draft publishes
does not depend on the smaller one, only when it does.
"""

from __future__ import annotations

from ssd.speculation.theory import expected_tokens
from ssd.speculation.tuner import Line


def drafting_speed(length: int, acceptance: float, forward: Line, chains: int, token_s: float) -> float:
    """Tokens per second of each of `chains` chains whose draft verifies `length` guesses a forward, each accepted with
    probability `acceptance`. `forward` is in rows of the batch, `token_s` what one more guess for all chains takes."""
    return expected_tokens(acceptance, length) / (forward.at(chains * (1 + length)) + length * token_s)


def best_length(acceptance: float, forward: Line, chains: int, token_s: float, most: int) -> int:
    """The `length`, 0 to `most`, of the highest `drafting_speed`; 0: the smaller draft does not pay."""
    return max(range(most + 1), key=lambda length: drafting_speed(length, acceptance, forward, chains, token_s))
