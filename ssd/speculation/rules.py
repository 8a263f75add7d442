"""Chooses the rule by which a request accepts draft tokens; no caller asks which rule it is.

Importing this file does not load torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ssd.law import Law
from ssd.speculation.acceptance import Outcome, rejection

if TYPE_CHECKING:
    from torch import Tensor

    from ssd.speculation.sampling import Noise


class VerifiedRow(NamedTuple):
    """A verified row: the target's adjusted `logits` [d + 1, V] for the tokens at `positions`.

    `draft_probs` [>= d, V] drew the d draft tokens; None if nothing did."""

    logits: Tensor
    law: Law
    positions: Sequence[int]
    draft_probs: Tensor | None
    noise: Noise


class AcceptanceRule:
    """States what a rule needs: this is `coupled`, the base of others. Rules have no state."""

    needs_draft_probs = False
    """True if outcomes depend on the distributions that drew the draft tokens; the draft then draws with a stream of
    its own."""
    shares_noise = True
    """True if the draft ranks its candidates with the noise of the target's samples."""
    emits_samples = True
    """True if the output is the target's samples up to the first that differs from the draft: ids equal those of `ar`,
    outcomes need no logits, and a device may find them."""
    allows_copies = True
    """True if the draft may replace its own token by one that it copies from the text."""

    def sampled_by(self, law: Law) -> Law:
        """Return the law by which the target samples a row."""
        return law

    def outcome(self, draft: Sequence[int], own: Sequence[int], row: VerifiedRow) -> Outcome:
        """Return the outcome of d > 0 `draft` tokens and d + 1 samples `own`; called unless `emits_samples`."""
        raise NotImplementedError


class RatioRule(AcceptanceRule):
    """Accepts draft tokens by the ratio of probabilities (`acceptance.rejection`)."""

    needs_draft_probs = True
    shares_noise = emits_samples = allows_copies = False

    def sampled_by(self, law: Law) -> Law:
        from ssd.speculation.noise import Stream, stream_seed

        return law.with_seed(stream_seed(law.seed, Stream.BONUS))

    def outcome(self, draft: Sequence[int], own: Sequence[int], row: VerifiedRow) -> Outcome:
        from ssd.speculation.noise import Stream, stream_seed, uniform
        from ssd.speculation.sampling import argmax, probabilities

        logits, law, positions, q, noise = row
        accept, again = (stream_seed(law.seed, stream) for stream in (Stream.ACCEPT, Stream.RESIDUAL))

        def sample(index: int, weights: Tensor) -> int:
            return argmax((weights.log() + noise(again, positions[index]))[None])[0]

        q = None if q is None else q[: len(draft)].to(logits.device)
        uniforms = [uniform(accept, position) for position in positions]
        cut = rejection(draft, q, probabilities(logits, law), uniforms, sample)
        return Outcome(len(draft), own[-1]) if cut is None else Outcome(len(cut) - 1, cut[-1])


_COUPLED = AcceptanceRule()
RULES = {"coupled": _COUPLED, "rejection": RatioRule()}
"""By the value of `--sampler`."""


def acceptance_rule(sampler: str, temperature: float) -> AcceptanceRule:
    """Return the rule of a request; without temperature all samplers are one."""
    return RULES[sampler] if temperature > 0.0 else _COUPLED
