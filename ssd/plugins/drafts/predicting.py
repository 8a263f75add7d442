"""The last layer of a draft that may read its target's tables: hidden states to logits of the ids that it predicts."""

from __future__ import annotations

import torch
from torch import Tensor

from ssd.kernels.groups import Groups, outputs_of
from ssd.layers.linear import Table
from ssd.models.head import Head, check_ids, embedding_table
from ssd.models.interface import Shape
from ssd.models.pairs import SHARED
from ssd.models.weights import Weights
from ssd.plugins.drafts.eagle3_config import OUTPUTS, TARGET_EMBEDDING
from ssd.system.fields import Config


def predicting(
    config: Config, weights: Weights, shape: Shape, device: torch.device, embedding: Tensor | Groups, theirs: bool
) -> tuple[Head, Table]:
    """Return the head of a draft that reads hidden states, and the table of its embedding.

    The head's rows are the draft's, or the target's. `d2t` has each predicted token's id less its place in the list.
    `theirs`: the embedding is the target's."""
    count, known, width = shape.outputs, shape.vocab_size, int(config["hidden_size"])
    own, ids, table = weights.has(OUTPUTS) and OUTPUTS not in config.get(SHARED, ()), None, None
    if own:
        rows = weights.whole(OUTPUTS, count, width)
    elif weights.has(OUTPUTS):
        rows = table = weights.whole(OUTPUTS, known, width)
    else:
        rows = table = embedding if theirs else weights.whole(TARGET_EMBEDDING, known, width)
    if weights.has("d2t"):
        ids = (torch.arange(count) + weights.integers("d2t", count).cpu()).to(device)
        check_ids(ids, known, "d2t")
        rows = rows if own else outputs_of(rows, ids)
    kept = None if table is None or count == known else Table(table, dots=True)
    head = Head(weights.linear(rows, None), ids, kept)
    return head, embedding_table(embedding, rows if table is None or kept is None else table, head)
