"""Runs a model of transformers whole, with transformers' own cache for each sequence, where paged attention cannot.

Such a cache only goes forward: no draft token can be taken back, and no prefix is shared. So the engine serves the
model in plain decoding. For the engine, the cache is the one state of a sequence, and a token's change is its id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ssd.errors import UsageError
from ssd.layers.recurrent import StateRow, StateSize
from ssd.models.checkpoint import Checkpoint
from ssd.models.interface import ForwardContext, Shape
from ssd.plugins.fallback import paged

# Names under which a decoder takes and returns its cache. Newer versions of transformers give one cache several names.
_CACHES = ("cache", "past_key_values", "cache_params", "state")
_PARTS, _SINGLES = (2, 5, 5), (2, *[1] * 10)  # tokens of each part of the text tried on loading

Cache = dict[str, Any]


def load(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, max_position: int, dummy: bool, cause: str
) -> Whole:
    """Load a model that paged attention cannot run for a `cause`; raise `UsageError` if this cannot either."""
    try:
        with paged.told():
            return Whole(paged.built(checkpoint, dtype, device, dummy), dtype, device, max_position, cause)
    except UsageError as error:
        raise UsageError(f"{cause}; with a cache of transformers: {error}") from error


class Whole:
    """A causal language model of transformers; see `ssd.models.interface.Model`.

    It is its own and only `ssd.layers.recurrent.Recurrence`, and owns the caches of the running sequences by slot. A
    cache is freed when the next sequence in its slot begins."""

    size = StateSize((0,), 1)

    def __init__(self, model: Any, dtype: torch.dtype, device: torch.device, max_position: int, cause: str) -> None:
        """Try the model with a short text; raise `UsageError` if its parts do not get the logits of the whole."""
        self.dtype, self.device = dtype, device
        decoder = model.get_decoder()
        self._decoder = model.model if decoder is model else decoder
        self.logits = paged.head_of(model, self._decoder)
        self._caches: dict[int, Cache] = {}
        self._singly = False  # True if a cache takes one token at a time
        vocab_size: int = model.get_input_embeddings().num_embeddings
        outputs = self._tried(model, paged.probe(vocab_size, device))
        known = getattr(model.config, "max_position_embeddings", None) or max_position
        self.shape = Shape(vocab_size, outputs, 1, 1, 1, 1, min(max_position, known), (self.size,), cause)

    @torch.inference_mode()
    def _tried(self, model: Any, ids: Tensor) -> int:
        """Find out if a cache takes several tokens at a time; return how many ids the model predicts.

        Raises `UsageError` if it does not even take one. Several must be as near to the logits of the whole text as
        single ones: in 16 bits a wrong state may hide behind a fixed tolerance."""
        expected: Tensor = model(ids[None], use_cache=False).logits[0]
        single = self._distance(ids, _SINGLES, expected)
        if not single <= paged.tolerance(self.dtype):
            raise UsageError("a text in parts gets other logits than at once")
        try:
            several = self._distance(ids, _PARTS, expected)
        except Exception:  # see `paged.told`
            several = torch.inf
        self._singly = not several <= 4 * single + torch.finfo(self.dtype).eps
        return expected.shape[1]

    def _distance(self, ids: Tensor, parts: Sequence[int], expected: Tensor) -> float:
        cache = Cache()
        hidden = [self._continued(cache, part) for part in ids.split(list(parts))]
        return paged.distance(self.logits(torch.cat(hidden)), expected)

    def forward(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        return context.recur(0, self, token_ids[:, None], token_ids[:, None])

    def __call__(
        self, states: Tensor, kept: Tensor, changes: Tensor, queries: Tensor, rows: Sequence[StateRow]
    ) -> Tensor:
        hidden = []
        for row, ids in zip(rows, changes[:, 0].split([row.tokens for row in rows]), strict=True):
            assert not row.replayed and row.save < 0, "no token is taken back, no state shared"
            # A row that leaves nothing is measured.
            cache = self._caches[row.source] if row.source >= 0 and row.target >= 0 else Cache()
            hidden.append(self._continued(cache, ids))
            if row.target >= 0:
                self._caches[row.target] = cache
        return torch.cat(hidden)

    def _continued(self, cache: Cache, ids: Tensor) -> Tensor:
        """Return the hidden states [n, width] of the next tokens of a text, and bring its cache up to them."""
        if cache and self._singly and len(ids) > 1:
            return torch.cat([self._continued(cache, each) for each in ids.split(1)])
        out = self._decoder(input_ids=ids[None], use_cache=True, **cache)
        name = next((name for name in _CACHES if getattr(out, name, None) is not None), None)
        if name is None:
            raise UsageError("its decoder returns no cache")
        cache.update({name: getattr(out, name)})
        return out[0][0]
