"""Synthetic acceptance: models of random weights, with the logits of the script in `chains.py`."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.config.emulation import StatedAgreement
from ssd.errors import UsageError
from ssd.layers.ranks import SINGLE, Ranks
from ssd.models.interface import ForwardContext, Model
from ssd.plugins.bench.emulation import chains

_SIDE = 32  # a script token is stored as two digits, which every dtype of hidden states can hold
_NEVER = -1000.0  # the logit of tokens outside of the script, beyond the reach of any noise


class Scripted:
    """`model`, or a rank's part of it, with logits of a script: `table` [script, script], by last token.

    Other tokens, in prompts, count modulo the script's size."""

    def __init__(self, model: Model, table: Tensor, ranks: Ranks = SINGLE) -> None:
        self._model, self._table = model, table.to(model.device, model.dtype)
        self.shape, self.dtype, self.device = model.shape, model.dtype, model.device
        self._ids = ranks.part(model.shape.outputs)

    def forward(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        """Return the model's hidden states, with the two digits of the script token appended to each."""
        hidden = self._model.forward(token_ids, context)
        token = token_ids % len(self._table)
        return torch.cat((hidden, torch.stack((token // _SIDE, token % _SIDE), dim=-1).to(hidden.dtype)), dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        own, digits = hidden[:, :-2].contiguous(), hidden[:, -2:].long()
        said = self._table[digits[:, 0] * _SIDE + digits[:, 1]]
        said = F.pad(said, (0, self.shape.outputs - said.shape[1]), value=_NEVER)[:, self._ids.start : self._ids.stop]
        return torch.add(said, self._model.logits(own), alpha=0)  # the head is computed for its time alone


def scripted(model: Model, asked: StatedAgreement, role: Literal["target", "draft"], ranks: Ranks = SINGLE) -> Scripted:
    """Return a pair's target or draft. Raises UsageError if its vocabulary is too small."""
    if model.shape.outputs < chains.VOCABULARY:
        raise UsageError(
            f"synthetic acceptance needs a vocabulary of {chains.VOCABULARY} tokens; the {role} has "
            f"{model.shape.outputs}"
        )
    target, draft = chains.pair(asked)
    return Scripted(model, chains.logits(target if role == "target" else draft), ranks)
