"""The ids that a draft predicts: a list, and the unlisted ids of the sequence's own text.

A short list makes the output layer cheap (FR-Spec, arXiv 2502.14856). Rare names and numbers of a prompt occur in its
answer again."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.draft.tree import Tree
from ssd.errors import UsageError
from ssd.models.head import Head
from ssd.models.interface import Model
from ssd.speculation.noise import NoiseCache

# Upper bound on the unlisted ids of a text.
MOST_TEXT = 256
_NONE = array("q")


class TextIds:
    """The last `MOST_TEXT` different unlisted `ids` of a text, oldest first.

    `listed` has a byte for each id: 0 if the id may be among `ids`."""

    def __init__(self, listed: bytes) -> None:
        self._listed, self._read, self._recent = listed, 0, dict[int, None]()
        self.ids = array("q")

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the tokens of the whole text `tokens` that are new since the last call."""
        new = [token for token in tokens[self._read :] if not self._listed[token]]
        self._read = len(tokens)
        if new:
            for token in new:
                self._recent.pop(token, None)
                self._recent[token] = None
            self.ids = array("q", list(self._recent)[-MOST_TEXT:])
            self._recent = dict.fromkeys(self.ids)


class DraftVocabulary:
    """Maps between columns of a draft's logits and token ids.

    The first `listed` columns are for `ids` int64 [listed]; None: for the first ids. `noise` is theirs. A list with ids
    beyond the target's `vocab_size` raises `UsageError`."""

    def __init__(self, model: Model, vocab_size: int, noise: NoiseCache) -> None:
        self._model, self.size = model, vocab_size
        head = cast(Head | None, getattr(model, "head", None))
        self.ids = None if head is None else head.ids
        self.listed = min(vocab_size, model.shape.outputs)
        if self.ids is not None and int(self.ids.max()) >= vocab_size:
            raise UsageError(f"the draft predicts id {int(self.ids.max())}, the target has ids below {vocab_size}")
        if self.ids is not None or self.listed < vocab_size:
            # Keep the number of vectors: a shorter list needs no more of them.
            most_bytes = 4 * self.listed * noise.capacity
            noise = NoiseCache(self.listed, model.device, most_bytes, ids=self.ids)
        self.noise = noise
        self._texts = WeakKeyDictionary[Tree, TextIds]()
        table = None if head is None or not hasattr(model, "logits_of") else head.table
        self._known = None if table is None else self._listed_bytes(min(len(table), vocab_size))

    def _listed_bytes(self, rows: int) -> bytes:
        """Return a byte for each id: 0 if unlisted and below `rows` of the table, else 1."""
        known = torch.ones(self.size, dtype=torch.uint8)
        known[:rows] = 0
        known[: self.listed if self.ids is None else 0] = 1
        if self.ids is not None:
            known[self.ids.cpu()] = 1
        return known.numpy().tobytes()

    def text(self, tree: Tree) -> array[int]:
        """Return the ids of a sequence's committed text that are ranked too."""
        if self._known is None:
            return _NONE
        found = self._texts.get(tree)
        if found is None:
            found = self._texts[tree] = TextIds(self._known)
        found.extend(tree.tokens)
        return found.ids

    def texts(self, trees: Sequence[Tree]) -> list[Tensor]:
        """Return `text` of each tree as int64 on the device; [] if all are empty."""
        found = [self.text(tree) for tree in trees]
        device = self._model.device
        return [torch.tensor(ids, dtype=torch.long, device=device) for ids in found] if any(found) else []

    def logits(self, hidden: Tensor, counts: Sequence[int], texts: Sequence[Tensor]) -> Tensor:
        """Return logits [n, listed + longest text] of hidden states [n, width], -inf after a shorter text.

        `counts` has the number of rows of each of the `texts`. Without texts the shape is [n, listed]."""
        logits = self._model.logits(hidden)[:, : self.listed]
        if not texts:
            return logits
        longest, parts = max(map(len, texts)), hidden.split(list(counts))
        logits_of = self._model.logits_of  # type: ignore[attr-defined]
        found = [logits_of(part, text) for part, text in zip(parts, texts, strict=True)]
        padded = [F.pad(part, (0, longest - part.shape[1]), value=-torch.inf) for part in found]
        return torch.cat((logits, torch.cat(padded)), dim=1)

    def names(self, places: Sequence[list[int]], texts: Sequence[Tensor]) -> list[list[int]]:
        """Return the ids of columns `places` of `logits`; `texts`: of each row, or none."""
        if self.ids is None and not texts:
            return list(places)
        found = torch.tensor(places)
        names = found if self.ids is None else self.ids.cpu()[found.clamp(max=self.listed - 1)]
        for row, text in enumerate(texts):
            if len(text):
                outside = found[row] >= self.listed
                names[row, outside] = text.cpu()[(found[row, outside] - self.listed).clamp(max=len(text) - 1)]
        return cast(list[list[int]], names.tolist())

    def columns(self, wide: Tensor, text: Tensor | None) -> Tensor:
        """Return the columns of listed ids and of a text from `wide`, which has all ids."""
        part = wide[:, : self.listed] if self.ids is None else wide[:, self.ids.to(wide.device)]
        return part if text is None else torch.cat((part, wide[:, text.to(wide.device)]), dim=1)

    def expanded(self, columns: Tensor, text: Tensor | None) -> Tensor:
        """Invert `columns`: return [n, size] with zeros for all other ids."""
        if self.ids is None and text is None:
            return columns
        wide = columns.new_zeros(len(columns), self.size)
        wide[:, slice(self.listed) if self.ids is None else self.ids] = columns[:, : self.listed]
        if text is not None:
            wide[:, text] = columns[:, self.listed : self.listed + len(text)]
        return wide
