"""Adjusts a request's logits before sampling: biases, a minimum length, penalties. Meaning and order are vLLM's.

Penalties depend on counts, which grow along a verification: logits after a draft token are adjusted as if that token
had been committed. So a row gets the computation of plain decoding."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Adjustment(NamedTuple):
    """What a request asks for.

    `bias` is added to the logits of its ids. No token of `ends` is possible before `min_tokens` of output,
    unless all that are allowed are ends. `repetition` divides positive logits of tokens in prompt or output and
    multiplies negative ones. `frequency` is subtracted from a token's logit for each time it is in the output,
    `presence` once. Only tokens of `allowed` (int64 [n]) are possible; None: all. Ids beyond the vocabulary have no
    effect."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: Mapping[int, float] = {}
    min_tokens: int = 0
    ends: Collection[int] = ()
    allowed: Tensor | None = None


class Written:
    """The committed text of one request: `in_prompt` bool [V], `counts` int32 [V] of the output, its `length`."""

    def __init__(self, prompt: Sequence[int], vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.in_prompt[torch.tensor(prompt, dtype=torch.long, device=device)] = True
        self.counts = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        self.length = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Add committed tokens."""
        ids = torch.tensor(tokens, dtype=torch.long, device=self.counts.device)
        self.counts.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        self.length += len(tokens)


def adjusted(
    logits: Tensor,
    adjustment: Adjustment,
    written: Written,
    draft: Sequence[int] = (),
    possible: Tensor | None = None,
) -> Tensor:
    """Returns `logits` [n, V] as new float32: row i comes after `written` and i of the n - 1 `draft` tokens.

    `possible` bool [m, V], m <= n, says which tokens a grammar allows in the first rows."""
    rows = logits.to(torch.float32, copy=True)
    vocab_size = rows.shape[-1]
    bias = {token: value for token, value in adjustment.bias.items() if token < vocab_size}
    if bias:
        rows[:, list(bias)] += torch.tensor(list(bias.values()), device=rows.device)
    if adjustment.allowed is not None:
        allowed = adjustment.allowed[adjustment.allowed < vocab_size].to(rows.device)
        rows = torch.full_like(rows, -torch.inf).index_copy_(1, allowed, rows[:, allowed])
    if possible is not None:
        rows[: len(possible)].masked_fill_(~possible, -torch.inf)
    too_early = adjustment.min_tokens - written.length
    if too_early > 0:
        ends = [token for token in adjustment.ends if token < vocab_size]
        ending = rows[:too_early, ends]
        rows[:too_early, ends] = -torch.inf
        if possible is not None or adjustment.allowed is not None:  # where nothing else is left, the text ends
            stuck = rows[:too_early].isneginf().all(-1, keepdim=True)
            rows[:too_early, ends] = torch.where(stuck, ending, -torch.inf)
    if (adjustment.repetition, adjustment.presence, adjustment.frequency) != (1.0, 0.0, 0.0):
        _penalise(rows, adjustment, written, draft)
    return rows


def _penalise(rows: Tensor, adjustment: Adjustment, written: Written, draft: Sequence[int]) -> None:
    """Changes, in place, the columns of tokens in the text: they are few beside the vocabulary.

    Each penalty is computed from the whole count, as adding up would round differently than plain decoding does."""
    in_text = written.in_prompt | (written.counts > 0)
    in_text[torch.tensor(draft, dtype=torch.long, device=rows.device)] = True
    columns = in_text.nonzero()[:, 0]
    counts = written.counts[columns].repeat(len(rows), 1)
    for index, token in enumerate(draft, 1):
        counts[index:, columns == token] += 1
    values, in_output = rows[:, columns], counts > 0
    if adjustment.repetition != 1.0:
        scaled = torch.where(values > 0, values / adjustment.repetition, values * adjustment.repetition)
        values = torch.where(in_output | written.in_prompt[columns], scaled, values)
    values = values - adjustment.frequency * counts
    values = values - adjustment.presence * in_output
    rows[:, columns] = values
