"""Synthetic acceptance: models of random weights that cost what they cost, and agree as often as stated.

The forward and the head run as they are, and what they say counts nothing: in its place stands what the scripted pair
of `ssd.emulation.chains` says after the same token.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.emulation import chains
from ssd.emulation.agreement import Stated
from ssd.errors import UsageError
from ssd.layers.ranks import SINGLE, Ranks
from ssd.models.interface import Model, Plan

_SIDE = 32  # tokens of the script are told in two digits, which every type of hidden states can hold
_NEVER = -1000.0  # the score of tokens that are not in the script, beyond the reach of any noise


class Scripted:
    """`model`, or one rank's part of it, with the answers of a script: `table` [script, script] has the logits after
    each of its tokens. Other tokens, in prompts, count as those of the script in turn."""

    def __init__(self, model: Model, table: Tensor, ranks: Ranks = SINGLE) -> None:
        self._model, self._table = model, table.to(model.device, model.dtype)
        self.shape, self.dtype, self.device = model.shape, model.dtype, model.device
        self._ids = ranks.part(model.shape.outputs)

    def forward(self, token_ids: Tensor, plan: Plan) -> Tensor:
        """The model's hidden states, and behind them the token that each stands for."""
        hidden = self._model.forward(token_ids, plan)
        token = token_ids % len(self._table)
        return torch.cat((hidden, torch.stack((token // _SIDE, token % _SIDE), dim=-1).to(hidden.dtype)), dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        own, digits = hidden[:, :-2].contiguous(), hidden[:, -2:].long()
        said = self._table[digits[:, 0] * _SIDE + digits[:, 1]]
        said = F.pad(said, (0, self.shape.outputs - said.shape[1]), value=_NEVER)[:, self._ids.start : self._ids.stop]
        return torch.add(said, self._model.logits(own), alpha=0)  # computed, as any head's would be


def scripted(model: Model, asked: Stated, role: Literal["target", "draft"], ranks: Ranks = SINGLE) -> Scripted:
    """The target or the draft of a pair that agrees as `asked`. UsageError where its vocabulary is too small."""
    if model.shape.outputs < chains.VOCABULARY:
        raise UsageError(
            f"synthetic acceptance needs a vocabulary of {chains.VOCABULARY} tokens; the {role} has "
            f"{model.shape.outputs}"
        )
    target, draft = chains.pair(asked)
    return Scripted(model, chains.logits(target if role == "target" else draft), ranks)
