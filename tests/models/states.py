"""A context for models with states, of sequences one beside the other, without pages: all that was read is kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ssd.layers.attention import PLAIN, Scores
from ssd.layers.recurrent import Recurrence, StateRow
from ssd.models.interface import Model


class Text:
    """What a model keeps of one text: keys and values, changes by position, and the state after `known` tokens."""

    def __init__(self, slot: int) -> None:
        self.slot, self.known = slot, 0
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}


class StatesContext:
    """One forward of some texts: of each (text, start, tokens). What lay at `start` or behind it was rejected."""

    def __init__(self, model: Model, texts: int, length: int = 256) -> None:
        self._sizes, self._length = model.shape.states, length
        self._states = [torch.full((texts, *size.state), torch.nan) for size in self._sizes]
        self._kept = [torch.full((texts * length, size.change), torch.nan) for size in self._sizes]
        self.texts = [Text(slot) for slot in range(texts)]
        self.hidden: dict[int, Tensor] = {}

    def begin(self, parts: Sequence[tuple[Text, int, int]]) -> None:
        self._parts = parts
        self.positions = torch.cat([torch.arange(start, start + count) for _, start, count in parts])

    def end(self) -> None:
        for text, start, _ in self._parts:
            text.known = start

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Scores = PLAIN) -> Tensor:
        out, first = [], 0
        for text, start, count in self._parts:
            here, first = slice(first, first + count), first + count
            for store, new in ((text.keys, k[here]), (text.values, v[here])):
                store[layer] = torch.cat((store.get(layer, new[:0])[:start], new))
            group = q.shape[1] // k.shape[1]
            keys, values = (store[layer].repeat_interleave(group, 1) for store in (text.keys, text.values))
            scores = torch.einsum("qhd,khd->hqk", q[here], keys) * q.shape[-1] ** -0.5
            seen = torch.arange(start + count) <= torch.arange(start, start + count)[:, None]
            shares = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out.append(torch.einsum("hqk,khd->qhd", shares, values).flatten(1))
        return torch.cat(out)

    def recur(self, index: int, recurrence: Recurrence, changes: Tensor, queries: Tensor) -> Tensor:
        assert recurrence.size == self._sizes[index] and changes.shape[1] == recurrence.size.change
        rows, places = [], []
        for text, start, count in self._parts:
            first = text.slot * self._length
            source = text.slot if text.known else -1
            replayed = range(first + text.known, first + start)
            rows.append(StateRow(source, replayed, count, text.slot if start else -1, len(replayed)))
            places += range(first + start, first + start + count)
        out = recurrence(self._states[index], self._kept[index], changes, queries, rows)
        self._kept[index][places] = changes
        return out

    def cache_places(self, layer: int) -> None:
        return None

    def views(self) -> None:
        return None

    def keep_hidden(self, layers: int, x: object) -> None:
        self.hidden[layers] = x if isinstance(x, Tensor) else x.value  # type: ignore[attr-defined]


def forward(model: Model, context: StatesContext, *parts: tuple[int, int, list[int]]) -> Tensor:
    """Logits of all tokens; a part is (number of a text, start, ids)."""
    context.begin([(context.texts[number], start, len(ids)) for number, start, ids in parts])
    with torch.inference_mode():
        hidden = model.forward(torch.tensor([token for *_, ids in parts for token in ids]), context)
        logits = model.logits(hidden)
    context.end()
    return logits
