"""The MTP head of a target's checkpoint: one layer of its family, with its embedding and last layer.

It reads pairs, as `eagle3_model.py` does: x = fc(norm(embedding of a token), norm(features of the token before)).
Features are hidden states, the target's or the head's own, after the last norm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ssd.errors import UsageError
from ssd.models.weights import Weights
from ssd.plugins.drafts.eagle3_model import FeatureContext, PairModel
from ssd.plugins.drafts.mtp_config import TARGET_NORM
from ssd.system.fields import Config, number


class MTPHead(PairModel):
    """An MTP head. It owns a model of the target's `family` whose look-up is replaced by `fc`."""

    def __init__(
        self, family: Any, config: Config, weights: Weights, dtype: torch.dtype, device: torch.device, max_position: int
    ) -> None:
        model = self._model = family(config, weights, dtype, device, max_position)
        if not hasattr(model, "_embed") or not hasattr(model, "_norm"):
            raise UsageError(f"an MTP head of family {config['model_type']!r} is not supported")
        self.width = self.fused = width = int(config["hidden_size"])
        self.shape, self.dtype, self.device = replace(model.shape, features=width), dtype, device
        self.head = getattr(model, "head", None)
        eps, norm = number(config, "rms_norm_eps", 1e-6), type(model._norm)
        self.fuse, self._token_norm, self._feature_norm = (
            norm(weights(name, width), eps)
            for name in (TARGET_NORM, "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight")
        )
        self._embed = model._embed
        model._embed = weights.linear(weights.stacked([("mtp.fc", width)], 2 * width), None)

    def forward(self, token_ids: Tensor, context: FeatureContext) -> Tensor:
        pairs = torch.cat((self._token_norm(self._embed(token_ids)), self._feature_norm(context.features)), dim=-1)
        hidden: Tensor = self._model.forward(pairs, context)
        context.keep_hidden(1, hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        found: Tensor = self._model.logits(hidden)
        return found

    def logits_of(self, hidden: Tensor, ids: Tensor) -> Tensor:
        found: Tensor = self._model.logits_of(hidden, ids)
        return found
