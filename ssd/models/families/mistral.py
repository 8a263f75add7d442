"""The Mistral family: Llama whose layers may attend to a window of the last tokens only (arXiv 2310.06825)."""

from __future__ import annotations

from typing import ClassVar

from ssd.errors import UsageError
from ssd.models.families.llama import SPLITS, Llama, window_of
from ssd.system.fields import Config


class Mistral(Llama):
    slides = True
    defaults: ClassVar[Config] = {"sliding_window": 4096}
    refused = ("attention_bias", "mlp_bias")
    splits = SPLITS

    def check(self, config: Config) -> None:
        super().check(config)
        window = config["sliding_window"]
        if any(window_of(config, layer) != window for layer in range(self.shape.layers)):
            raise UsageError("windows in some of the layers are not supported in this family (ministral has them)")
