"""Keeps the requested adjustments of logits on the device, where a graph applies them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ssd.execution.tables import Upload, uploaded
from ssd.speculation.adjustment import ENDS, IN_PROMPT, NUMBERS, ONCE, RECENT, AdjustedRows, Text

# Most new tokens of a slot that are sent alone; a text with more is sent as a whole.
_MOST_NEW = 2 * RECENT


class AdjustmentTable:
    """Owns the texts and adjustments of all slots, as in `AdjustedRows`; the last slot, for padding, is neutral.

    The host sends committed tokens before each launch. A verification that is launched behind another one gets its
    outcome from the device."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._text = torch.zeros(slots + 1, vocab_size, dtype=torch.int32, device=device)
        self._bias = torch.zeros(slots + 1, vocab_size, dtype=torch.float32, device=device)
        self._words = Upload((slots + 1, NUMBERS + RECENT), torch.int32, device)
        self._new = Upload((2, slots * _MOST_NEW), torch.int64, device)
        self._told: list[tuple[Sequence[int], int]] = [((), 0)] * slots  # tokens, and how many of them are known

    @property
    def words(self) -> Tensor:
        """Return the `words` of `AdjustedRows`."""
        return self._words.device

    def of(self, fields: Mapping[str, Tensor]) -> AdjustedRows:
        """Return the adjustments of a batch from its `ssd.execution.tables.BatchTensors.fields`."""
        starts, sequences, ids = (fields[name] for name in ("starts", "sequences", "ids"))
        return AdjustedRows(starts, sequences, ids, self.words, self._text, self._bias)

    def tell(self, texts: Iterable[tuple[int, Text | None]]) -> None:
        """Send the new tokens of the committed texts of (slot, text); None: this slot's logits are not adjusted.

        A slot's text is extended as long as its `tokens` is the same list; else it is sent anew."""
        self._words.wait()
        new, size = list[int](), self._text.shape[1]
        for slot, text in texts:
            words = self._words.host[slot]
            words[:] = 0
            if text is None:
                continue
            tokens, known = self._told[slot]
            if tokens is not text.tokens or not known <= len(tokens) <= known + _MOST_NEW:
                self._begin(slot, text)
            else:
                new += [slot * size + token for token in tokens[known:]]
            self._told[slot] = text.tokens, len(text.tokens)
            wish = text.adjustment
            words[:3].view("float32")[:] = wish.repetition, wish.presence, wish.frequency
            words[3:NUMBERS] = max(0, wish.min_tokens - (len(text.tokens) - text.prompt)), 1
            words[NUMBERS:] = -1
        self._words.send()
        if new:
            self._add(new)

    def _add(self, places: Sequence[int]) -> None:
        """Count the tokens at these places of the flat table once more."""
        self._new.wait()
        self._new.host[0], self._new.host[1] = self._text.numel() - 1, 0  # in the neutral slot, where nothing is added
        self._new.host[0, : len(places)], self._new.host[1, : len(places)] = places, ONCE
        self._new.send()
        where, count = self._new.device
        self._text.view(-1).index_add_(0, where, count.int())

    def _begin(self, slot: int, text: Text) -> None:
        """Send a whole text and its bias."""
        size, wish = self._text.shape[1], text.adjustment
        table = np.bincount(text.tokens[text.prompt :], minlength=size).astype(np.int32) * ONCE
        table[list(text.tokens[: text.prompt])] |= IN_PROMPT
        table[[token for token in wish.ends if token < size]] |= ENDS
        self._text[slot] = uploaded(torch.from_numpy(table), self._text.device)
        bias = torch.zeros(size)
        if wish.allowed is not None:
            bias.fill_(-torch.inf)[wish.allowed[wish.allowed < size]] = 0.0
        for token, value in wish.bias.items():
            if token < size:
                bias[token] += value
        self._bias[slot] = uploaded(bias, self._bias.device)
