"""The OLMo 3 family: OLMo 2 with windows in three of four layers. Only full layers scale rotation."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ssd.layers.rotary import Rotary, frequencies
from ssd.models.families.llama import through_layers
from ssd.models.interface import ForwardContext
from ssd.models.layer_kinds import FULL, SLIDING
from ssd.models.weights import Weights
from ssd.plugins.families.gemma3 import layer_types, rope
from ssd.plugins.families.olmo2 import OLMO_SPLITS, Olmo2
from ssd.system.fields import Config, number


class Olmo3(Olmo2):
    slides = True
    defaults: ClassVar[Config] = {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4}
    splits = OLMO_SPLITS

    def __init__(
        self, config: Config, weights: Weights, dtype: torch.dtype, device: torch.device, max_position: int
    ) -> None:
        config = {**self.defaults, **config}
        theta, self._kinds = number(config, "rope_theta", 5e5), layer_types(config)
        ropes = {
            kind: rope({**config, "rope_theta": theta, "rope_local_base_freq": theta}, kind) for kind in (FULL, SLIDING)
        }
        whole = {**config, "rope_scaling": None, **ropes[FULL], "layer_types": self._kinds}
        super().__init__(whole, weights, dtype, device, max_position)
        sliding = frequencies(self.shape.head_dim, ropes[SLIDING], max_position)
        self._rotary_of = {FULL: self._rotary, SLIDING: Rotary(sliding, max_position, dtype, device)}

    def forward(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        x = self._embed(token_ids)
        tables = {kind: rotary.at(context.positions) for kind, rotary in self._rotary_of.items()}
        context.keep_hidden(0, x)
        return through_layers(x, self._layers, [tables[kind] for kind in self._kinds], self._norm, context)
