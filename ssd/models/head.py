"""The last layer of a model: hidden states to logits of all ids, or of a short list."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ssd.errors import UsageError
from ssd.kernels.groups import Groups, outputs_of
from ssd.layers.linear import Table
from ssd.models.checkpoint import LIST_FILE, Checkpoint
from ssd.models.draft_kinds import draft_kind
from ssd.models.header import check_safetensors
from ssd.models.pairs import DRAFT_VOCAB
from ssd.models.weights import LISTED, LinearLayer, Weights


class Head:
    """Computes the logits of the ids that a model predicts.

    `ids` int64 [n]: the id of each logit; None: the ids from 0 on. `table` [V, width]: rows of all ids, unless all are
    predicted or the checkpoint has no other rows."""

    def __init__(self, linear: LinearLayer, ids: Tensor | None = None, table: Table | None = None) -> None:
        self.linear, self.ids, self.table = linear, ids, table

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits [m, n] of hidden states [m, width]."""
        return self.linear(hidden)

    def of(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return logits [m, k] of any `ids` int64 [k], from the table, which must exist."""
        assert self.table is not None, "there are only rows of the listed ids"
        return self.table.dots(hidden, ids)


class Predicting:
    """Base of a model that predicts by its `head`; a subclass may scale the logits."""

    head: Head

    def logits(self, hidden: Tensor) -> Tensor:
        return self.scaled(self.head(hidden))

    def logits_of(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return self.scaled(self.head.of(hidden, ids))

    def scaled(self, logits: Tensor) -> Tensor:
        return logits


def with_list(draft: Checkpoint) -> Checkpoint:
    """Return `draft` with its folder's list of ids that it predicts. Raises UsageError for a wrong list."""
    file = draft.directory / LIST_FILE
    if not draft.tensors or not draft_kind(draft).reads_list or not file.is_file():
        return draft
    found = check_safetensors(file)
    if found.keys() != {LISTED} or found[LISTED].dtype not in ("I32", "I64") or len(found[LISTED].shape) != 1:
        raise UsageError(f"{file} must have one tensor, {LISTED!r}, a list of int32 or int64")
    (length,) = found[LISTED].shape
    if not 0 < length == draft.count(DRAFT_VOCAB, length):
        raise UsageError(f"{file} lists {length} ids, config.json says {DRAFT_VOCAB} {draft.config.get(DRAFT_VOCAB)}")
    return replace(draft, config=draft.config | {DRAFT_VOCAB: length}, tensors=draft.tensors | found)


def head_of(weights: Weights, weight: Tensor | Groups, outputs: int, vocab_size: int, device: torch.device) -> Head:
    """Return the head of a model that predicts `outputs` ids: those of its list, else the first ones.

    A head of some ids keeps `weight` [vocab_size, width] as its table."""
    if outputs == vocab_size:
        return Head(weights.linear(weight, None))
    ids = None
    if weights.stored(LISTED):
        ids = weights.integers(LISTED, outputs).sort().values.to(device)
        check_ids(ids, vocab_size, LISTED)
    rows = outputs_of(weight, slice(outputs) if ids is None else ids)
    return Head(weights.linear(rows, None), ids, Table(weight, dots=True))


def embedding_table(embedding: Tensor | Groups, predicting: Tensor | Groups, head: Head) -> Table:
    """Return an embedding's table; share the memory of `head` if it predicts with the same weight."""
    if predicting is not embedding:
        return Table(embedding)
    return Table(embedding, head.linear) if head.table is None else head.table


def check_ids(ids: Tensor, vocab_size: int, name: str) -> None:
    """Raise `UsageError` unless `ids` int64 [n] are distinct ids below `vocab_size`."""
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size or len(ids.unique()) < len(ids):
        raise UsageError(f"{name} does not name {len(ids)} tokens of a vocabulary of {vocab_size}")
