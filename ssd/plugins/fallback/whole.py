"""Runs a model of transformers whole, with transformers' cache, where paged attention cannot.

No token can be taken back and no prefix be shared: decoding is plain. A sequence's one state is the cache, a token's
change its id."""

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
    """Load a model that paged attention cannot run for a `cause`; raise `UsageError` if this fails too."""
    try:
        with paged.told():
            return Whole(paged.built(checkpoint, dtype, device, dummy), dtype, device, max_position, cause)
    except UsageError as error:
        raise UsageError(f"{cause}; with a cache of transformers: {error}") from error


class Whole:
    """A causal language model of transformers, and its own `ssd.layers.recurrent.Recurrence`.

    A running sequence's cache, by slot, is freed when the next sequence in the slot begins."""

    size = StateSize((0,), 1)

    def __init__(self, model: Any, dtype: torch.dtype, device: torch.device, max_position: int, cause: str) -> None:
        """Try the model with a short text; raise `UsageError` if its parts get other logits than the whole."""
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

        Raises `UsageError` if it takes not even one. Several are compared with single ones: in 16 bits a wrong state
        may hide behind a fixed tolerance."""
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
        """Return the hidden states [n, width] of a text's next tokens, and bring its cache up to them."""
        if cache and self._singly and len(ids) > 1:
            return torch.cat([self._continued(cache, each) for each in ids.split(1)])
        out = self._decoder(input_ids=ids[None], use_cache=True, **cache)
        name = next((name for name in _CACHES if getattr(out, name, None) is not None), None)
        if name is None:
            raise UsageError("its decoder returns no cache")
        cache.update({name: getattr(out, name)})
        return out[0][0]
