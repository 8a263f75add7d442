"""Adjusts a request's logits before sampling, as vLLM does.

The logits after a draft token are adjusted as if it were committed, so that every row equals plain decoding."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Adjustment(NamedTuple):
    """The changes to the logits that a request asks for. Ids beyond the vocabulary have no effect.

    No token of `ends` is possible before `min_tokens` of output, unless no other is allowed. `repetition` divides
    positive logits of tokens in prompt or output and multiplies negative ones. `frequency` is subtracted for each time
    a token is in the output, `presence` once. Only tokens of `allowed` (int64 [n]) are possible; None: all."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: Mapping[int, float] = {}
    min_tokens: int = 0
    ends: Collection[int] = ()
    allowed: Tensor | None = None


class Written:
    """The committed text of one request: distinct tokens, their counts in the output, its `length`.

    It uses NumPy: for so few numbers a torch operation costs more than its arithmetic."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.length = 0
        self._places: dict[int, int] = {}
        self._ids, self.counts = np.zeros(0, np.int64), np.zeros(0, np.float32)
        self._append(prompt)
        self._prompt_tokens = len(self._ids)

    def extend(self, tokens: Sequence[int]) -> None:
        self._append(tokens)
        np.add.at(self.counts, [self._places[token] for token in tokens], 1)
        self.length += len(tokens)

    def along(self, draft: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.bool_]]:
        """Return the distinct tokens of text and draft, int64 [n], with counts and marks.

        Counts in the output, after 0, 1, ... draft tokens, are float32 [drafts + 1, n]. Marks, bool of that shape, are
        True where the token is in prompt or output."""
        new = [token for token in dict.fromkeys(draft) if token not in self._places]
        ids, counts = self._ids, self.counts
        if new:
            ids, counts = np.append(ids, new), np.append(counts, np.zeros(len(new), np.float32))
        rows = np.repeat(counts[None], len(draft) + 1, axis=0)
        for index, token in enumerate(draft, 1):
            rows[index:, self._places[token] if token in self._places else len(self._ids) + new.index(token)] += 1
        seen = rows > 0
        seen[:, : self._prompt_tokens] = True
        return ids, rows, seen

    def _append(self, tokens: Sequence[int]) -> None:
        new = [token for token in dict.fromkeys(tokens) if token not in self._places]
        if new:
            self._places |= {token: len(self._places) + index for index, token in enumerate(new)}
            self._ids = np.append(self._ids, new)
            self.counts = np.append(self.counts, np.zeros(len(new), np.float32))


def adjusted(
    logits: Tensor,
    adjustment: Adjustment,
    written: Written,
    draft: Sequence[int] = (),
    possible: Tensor | None = None,
) -> Tensor:
    """Return `logits` [n, V] as adjusted float32; row i comes after `written` and i `draft` tokens.

    `possible` bool [m, V], m <= n, says which tokens a grammar allows in the first m rows."""
    rows = _copied(logits)
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
        if possible is not None or adjustment.allowed is not None:  # where only ends are left, the text may end
            stuck = rows[:too_early].isneginf().all(-1, keepdim=True)
            rows[:too_early, ends] = torch.where(stuck, ending, -torch.inf)
    if (adjustment.repetition, adjustment.presence, adjustment.frequency) != (1.0, 0.0, 0.0):
        _penalise(rows, adjustment, written, draft)
    return rows


def _copied(logits: Tensor) -> Tensor:
    if logits.is_cpu and logits.dtype == torch.float32:  # one thread is faster than waking torch's
        return torch.from_numpy(logits.numpy().copy())
    return logits.to(torch.float32, copy=True)


def _penalise(rows: Tensor, adjustment: Adjustment, written: Written, draft: Sequence[int]) -> None:
    ids, counts, seen = written.along(draft)
    if rows.is_cpu:
        table = rows.numpy()
        table[:, ids] = _penalised(table[:, ids], counts, seen, adjustment)
        return
    columns = torch.from_numpy(ids).to(rows.device)
    values = _penalised(rows[:, columns].cpu().numpy(), counts, seen, adjustment)
    rows[:, columns] = torch.from_numpy(values).to(rows.device)


def _penalised(values: NDArray[Any], counts: NDArray[Any], seen: NDArray[np.bool_], by: Adjustment) -> NDArray[Any]:
    scaled = np.where(values > 0, values / by.repetition, values * by.repetition)
    values = np.where(seen, scaled, values) - by.frequency * counts
    return values - by.presence * counts.clip(None, 1)  # from whole counts: a sum of steps would round differently


class Text(NamedTuple):
    """A request's committed `tokens`, the first `prompt` of them its prompt, and its adjustment."""

    tokens: Sequence[int]
    prompt: int
    adjustment: Adjustment
