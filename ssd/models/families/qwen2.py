"""The Qwen2 and Qwen2.5 families: Llama with biases on queries, keys and values (arXiv 2407.10671)."""

from __future__ import annotations

from ssd.models.families.llama import SPLITS, Attention, Llama
from ssd.system.fields import Config

# Values of fields that Qwen's configs leave out.
WINDOWS: Config = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}


class Qwen2Attention(Attention):
    in_one_call = True

    @staticmethod
    def biases(config: Config) -> tuple[bool, bool]:
        return True, False


class Qwen2(Llama):
    attention: type[Attention] = Qwen2Attention
    slides = True
    defaults = WINDOWS
    refused = ("mlp_bias",)
    splits = SPLITS
