"""The GPT-2 family: learned positions, layer norms, one fused projection, weights stored [in, out]."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.errors import UsageError
from ssd.layers.attention import Scores
from ssd.models.families.llama import output_weight
from ssd.models.head import Predicting, embedding_table, head_of
from ssd.models.interface import ForwardContext, Shape
from ssd.models.pairs import DRAFT_VOCAB
from ssd.models.split import VOCABULARY, Split, Splits
from ssd.models.weights import LinearLayer, MakeLinear, Weights
from ssd.system.fields import Config, count, flag, number, refuse

# Name of an activation in config.json -> torch's approximation of it.
_GELU = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "none"}


# Weights are [in, out] here.
SPLITS: Splits = {
    "wte": VOCABULARY,
    "c_attn": Split(1, 0, blocks=3),
    "c_fc": Split(1, 0),
    "c_proj": Split(0, None),
    "lm_head": VOCABULARY,
}


def _linear(weights: Weights, make: MakeLinear, name: str, inputs: int, outputs: int) -> LinearLayer:
    return make(weights(f"{name}.weight", inputs, outputs).t().contiguous(), weights(f"{name}.bias", outputs))


def _norm(weights: Weights, name: str, width: int, config: Config) -> Callable[[Tensor], Tensor]:
    eps = number(config, "layer_norm_epsilon", 1e-5)
    weight, bias = weights(f"{name}.weight", width), weights(f"{name}.bias", width)
    return lambda x: F.layer_norm(x, (width,), weight, bias, eps)


class Gpt2Block:
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: Config, shape: Shape, weights: Weights, layer: int) -> None:
        width = int(config["hidden_size"])
        inner = weights.share.size(count(config, "n_inner", 4 * width), "n_inner")
        attended = shape.heads * shape.head_dim
        self._first, self._second = (_norm(weights, name, width, config) for name in ("ln_1", "ln_2"))
        self._qkv = _linear(weights, weights.linear, "attn.c_attn", width, 3 * attended)
        self._out = _linear(weights, weights.row_linear, "attn.c_proj", attended, width)
        self._up = _linear(weights, weights.linear, "mlp.c_fc", width, inner)
        self._down = _linear(weights, weights.row_linear, "mlp.c_proj", inner, width)
        self._shape, self._layer = shape, layer
        self._approximate = _GELU[config.get("activation_function", "gelu_new")]
        scale = shape.head_dim**-0.5 if flag(config, "scale_attn_weights", True) else 1.0
        self._scores = Scores(scale / (layer + 1) if flag(config, "scale_attn_by_inverse_layer_idx") else scale)

    def __call__(self, x: Tensor, context: ForwardContext) -> Tensor:
        qkv = self._qkv(self._first(x)).view(x.shape[0], 3, self._shape.heads, self._shape.head_dim)
        x = x + self._out(context.attend(self._layer, qkv[:, 0], qkv[:, 1], qkv[:, 2], self._scores))
        return x + self._down(F.gelu(self._up(self._second(x)), approximate=self._approximate))


class GPT2(Predicting):
    splits = SPLITS

    def __init__(
        self, config: Config, weights: Weights, dtype: torch.dtype, device: torch.device, max_position: int
    ) -> None:
        if config.get("activation_function", "gelu_new") not in _GELU:
            raise UsageError(f"activation {config['activation_function']!r} is not supported ({', '.join(_GELU)} are)")
        refuse(config, ("add_cross_attention",))  # to an encoder
        width, heads, known = (
            int(config[key]) for key in ("hidden_size", "num_attention_heads", "max_position_embeddings")
        )
        if width % heads:
            raise UsageError(f"hidden_size {width} is no multiple of num_attention_heads {heads}")
        vocab_size, layers = int(config["vocab_size"]), int(config["num_hidden_layers"])
        outputs, longest = count(config, DRAFT_VOCAB, vocab_size), min(max_position, known)
        shape = Shape(vocab_size, outputs, layers, heads, heads, width // heads, longest)
        self.shape = weights.share.shape(shape)
        self.dtype, self.device = dtype, device
        model = weights.below("transformer") if weights.has("transformer.wte.weight") else weights
        embedding = model.whole("wte.weight", vocab_size, width)
        predicting = output_weight(config, weights, embedding, tied=True)
        self.head = head_of(weights, predicting, shape.outputs, vocab_size, device)
        self._embed = weights.embedding(embedding_table(embedding, predicting, self.head), vocab_size)
        self._positions = model("wpe.weight", known, width)
        self._blocks = [Gpt2Block(config, self.shape, model.below(f"h.{index}"), index) for index in range(layers)]
        self._norm = _norm(model, "ln_f", width, config)

    def forward(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        x = self._embed(token_ids) + self._positions[context.positions]
        context.keep_hidden(0, x)
        for index, block in enumerate(self._blocks, 1):
            x = block(x, context)
            context.keep_hidden(index, x)
        return self._norm(x)
