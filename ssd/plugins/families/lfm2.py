"""The LFM2 family: most layers have a short convolution between two gates for attention (arXiv 2511.23404)."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ssd.layers.norm import RMSNorm
from ssd.layers.recurrent import ShortConvolution, StateSize
from ssd.models.families.llama import SPLITS, FeedForward, optional_bias
from ssd.models.families.qwen3 import Qwen3Attention
from ssd.models.families.qwen3_5 import Qwen35, convolved
from ssd.models.interface import ForwardContext
from ssd.models.layer_kinds import CONVOLUTION
from ssd.models.weights import Weights
from ssd.system.fields import Config, count, flag, number


class Lfm2Attention(Qwen3Attention):
    out_name = "out_proj"
    norm_names = "q_layernorm", "k_layernorm"


class Lfm2FeedForward(FeedForward):
    gate_up = ("w1", "w3")
    down_name = "w2"


class GatedConvolution:
    """out(c * convolution(b * x)), where b, c and x are one projection."""

    def __init__(self, config: Config, weights: Weights, index: int) -> None:
        width, window = count(config, "hidden_size"), convolved(config, "conv_L_cache")
        biased, self._index = flag(config, "conv_bias"), index
        self._in, self._out = (
            weights.linear(weights.stacked([(name, size)], width), optional_bias(weights, name, size, biased))
            for name, size in (("in_proj", 3 * width), ("out_proj", width))
        )
        weight = weights("conv.weight", width, 1, window)[:, 0]
        self._convolution = ShortConvolution(weight, optional_bias(weights, "conv", width, biased))
        self.sizes: tuple[StateSize, ...] = (self._convolution.size,)

    def __call__(self, x: Tensor, table: tuple[Tensor, Tensor], context: ForwardContext) -> Tensor:
        b, c, x = self._in(x).chunk(3, dim=1)
        gated = b * x
        return self._out(c * context.recur(self._index, self._convolution, gated, gated[:, :0]))


class Lfm2(Qwen35):
    attention = Lfm2Attention
    recurrent = GatedConvolution
    kind = CONVOLUTION
    norm = RMSNorm
    norms = "operator_norm", "ffn_norm", "embedding_norm"
    below = "conv", "feed_forward"
    defaults: ClassVar[Config] = {"conv_L_cache": 3, "tie_word_embeddings": True, "rope_theta": 1e6}
    refused = ("attention_bias", "mlp_bias", "sliding_window")
    splits = SPLITS

    @classmethod
    def completed(cls, config: Config) -> dict[str, Any]:
        tied = flag(config, "tie_embedding", flag(config, "tie_word_embeddings", True))
        own = {"rms_norm_eps": number(config, "norm_eps", 1e-5), "tie_word_embeddings": tied}
        return {**super().completed(config), **own, "intermediate_size": _inner(config)}

    @staticmethod
    def attends(config: Config, layer: int) -> bool:
        full = config.get("full_attn_idxs")
        return full is None or layer in full

    def feed_forward(self, config: Config, weights: Weights, layer: int) -> FeedForward:
        return Lfm2FeedForward(config, weights)


def _inner(config: Config) -> int:
    inner = count(config, "block_ff_dim", count(config, "intermediate_size", 12288))
    if not flag(config, "block_auto_adjust_ff_dim", True):
        return inner
    inner = int(2 * inner / 3)
    if config.get("block_ffn_dim_multiplier", 1.0) is None:
        return inner
    inner, multiple = (
        int(number(config, "block_ffn_dim_multiplier", 1.0) * inner),
        count(config, "block_multiple_of", 256),
    )
    return -(-inner // multiple) * multiple
