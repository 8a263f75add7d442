"""Keeps the requested adjustments of logits on the device, where a graph applies them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ssd.execution.tables import Upload, uploaded
from ssd.kernels.gpu import fused
from ssd.speculation.adjustment import Text

# A slot has NUMBERS numbers, then RECENT token ids; its text adds up IN_PROMPT, ENDS and ONCE (see `adjust`).
NUMBERS, RECENT = 5, 16
IN_PROMPT, ENDS, ONCE = 1, 2, 4
# Most new tokens of a slot that are sent alone; a text with more is sent as a whole.
_MOST_NEW = 2 * RECENT


@fused
def adjust(
    logits: Tensor,
    starts: Tensor,
    sequences: Tensor,
    ids: Tensor,
    words: Tensor,
    text: Tensor,
    bias: Tensor,
    recent: int = RECENT,
) -> Tensor:
    """Apply `ssd.speculation.adjustment.adjusted` to logits [n, V] without waiting for the device.

    Row r has the tokens `ids[starts[r] : starts[r + 1]]` (`ids` int64 [n], `starts` int64 [rows + 1]); `sequences`
    int64 [rows] are indices into `words`, `text` and `bias`. `words` int32 [sequences, NUMBERS + recent]: the bits of
    float32 repetition, presence and frequency; the output tokens still required after `text` before an end; 1 if
    adjusted; the tokens after `text` up to the row's first, then -1. The row's other tokens are draft tokens. `text`
    int32 [sequences, V] adds ONCE for each time in the output, IN_PROMPT, ENDS. `bias` float32 [sequences, V] is -inf
    where a token is not allowed.

    Ends are masked even if nothing else is possible: no request may have both `min_tokens` and `allowed`."""
    place = torch.arange(len(logits), device=logits.device)
    row = torch.searchsorted(starts[1:].contiguous(), place, right=True)
    slot, begin = sequences[row], starts[row]
    numbers, told = words[slot], text[slot]
    repetition, presence, frequency = numbers[:, :3].contiguous().view(torch.float32).T[..., None]
    until, active, last = numbers[:, 3], numbers[:, 4:5] > 0, numbers[:, NUMBERS:].long()
    drafts = place[:, None] - torch.arange(recent - 1, device=place.device)
    seen = torch.cat((last, torch.where(drafts > begin[:, None], ids[drafts.clamp(min=0)], -1)), dim=1)
    counts = (told // ONCE).scatter_add_(1, seen.clamp(min=0), (seen >= 0).int())
    early = until - (last >= 0).sum(1) - (place - begin) > 0
    raw, added = logits.float(), bias[slot]
    rows = torch.where(added.isneginf() | (early[:, None] & (told & ENDS > 0)), -torch.inf, raw + added)
    scaled = torch.where(rows > 0, rows / repetition, rows * repetition)
    rows = torch.where((counts > 0) | (told & IN_PROMPT > 0), scaled, rows)
    return torch.where(active, rows - frequency * counts - presence * (counts > 0), raw)


class AdjustmentTable:
    """Owns the texts and adjustments of all slots for `adjust`; the last slot, for padding, is neutral.

    The host sends committed tokens before each launch; a launch behind another one gets its outcome on the device."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._text = torch.zeros(slots + 1, vocab_size, dtype=torch.int32, device=device)
        self._bias = torch.zeros(slots + 1, vocab_size, dtype=torch.float32, device=device)
        self._words = Upload((slots + 1, NUMBERS + RECENT), torch.int32, device)
        self._new = Upload((2, slots * _MOST_NEW), torch.int64, device)
        self._told: list[tuple[Sequence[int], int]] = [((), 0)] * slots  # tokens, and how many of them are known

    @property
    def words(self) -> Tensor:
        return self._words.device

    def adjust(self, logits: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        """Return the adjusted logits of a batch with these `BatchTensors.fields`."""
        starts, sequences, ids = (fields[name] for name in ("starts", "sequences", "ids"))
        return adjust(logits, starts, sequences, ids, self.words, self._text, self._bias)

    def tell(self, texts: Iterable[tuple[int, Text | None]]) -> None:
        """Send new tokens of the committed texts of (slot, text); None: the slot's logits stay.

        A text is extended as long as its `tokens` is the same list; else it is sent anew."""
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
        self._new.wait()
        self._new.host[0], self._new.host[1] = self._text.numel() - 1, 0  # in the neutral slot, where nothing is added
        self._new.host[0, : len(places)], self._new.host[1, : len(places)] = places, ONCE
        self._new.send()
        where, count = self._new.device
        self._text.view(-1).index_add_(0, where, count.int())

    def _begin(self, slot: int, text: Text) -> None:
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
