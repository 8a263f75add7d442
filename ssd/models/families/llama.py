"""The Llama family: Llama 2 and 3, SmolLM2 and other checkpoints with `model_type` llama."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import repeat
from typing import Any, ClassVar

import torch
from torch import Tensor

from ssd.errors import UsageError
from ssd.kernels.cpu import Product
from ssd.kernels.decoder import Decoder, DecoderLayer, Heads
from ssd.kernels.gpu import fuses
from ssd.kernels.groups import Groups, equal
from ssd.kernels.guess import GuessStep
from ssd.layers.attention import Scores
from ssd.layers.linear import Table
from ssd.layers.norm import Residual, RMSNorm, silu_mul
from ssd.layers.rotary import Rotary, frequencies, turned
from ssd.models.head import Head, Predicting, embedding_table, head_of
from ssd.models.interface import ForwardContext, Shape
from ssd.models.layer_kinds import FULL, SLIDING
from ssd.models.pairs import DRAFT_VOCAB
from ssd.models.split import COLUMN, KEYS, ROW, VOCABULARY, Splits
from ssd.models.weights import LinearLayer, Weights
from ssd.system.fields import Config, count, flag, number, refuse

NORMS = "input_layernorm", "post_attention_layernorm", "norm"  # of attention, of the feed-forward, the last
SPLITS: Splits = {
    "embed_tokens": VOCABULARY,
    "q_proj": COLUMN,
    "k_proj": KEYS,
    "v_proj": KEYS,
    "o_proj": ROW,
    "gate_proj": COLUMN,
    "up_proj": COLUMN,
    "down_proj": ROW,
    "lm_head": VOCABULARY,
}


def check_activation(config: Config, name: str = "hidden_act", computed: str = "silu") -> None:
    """Raise `UsageError` if the config's field `name` asks for an activation other than `computed`."""
    if (asked := config.get(name, computed)) != computed:
        raise UsageError(f"activation {asked!r} is not supported ({computed} is)")


def shape_of(config: Config, max_position: int) -> Shape:
    """Return the sizes in a Llama-like config; raise `UsageError` for a missing or wrong one."""
    vocab_size, heads = count(config, "vocab_size"), count(config, "num_attention_heads")
    return Shape(
        vocab_size=vocab_size,
        outputs=min(vocab_size, count(config, DRAFT_VOCAB, vocab_size)),
        layers=count(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=count(config, "num_key_value_heads", heads),
        head_dim=count(config, "head_dim", count(config, "hidden_size") // heads),
        max_position=max_position,
    )


def window_of(config: Config, layer: int) -> int | None:
    """Return the sliding window of a layer in tokens, or None if it sees all tokens.

    Raises `UsageError` for unknown kinds of layers, and for a sliding layer without a window."""
    used = config.get("sliding_window") is not None and flag(config, "use_sliding_window", True)
    window = count(config, "sliding_window") if used else None
    if (kinds := config.get("layer_types")) is None:
        return window if layer >= int(config.get("max_window_layers") or 0) else None
    if kinds[layer] not in (FULL, SLIDING):
        raise UsageError(f"layers of {kinds[layer]!r} are not supported ({FULL}, {SLIDING} are)")
    if kinds[layer] == SLIDING and window is None:
        raise UsageError(f"layer_types has {SLIDING}, but the config has no sliding_window that is used")
    return window if kinds[layer] == SLIDING else None


def output_weight(config: Config, weights: Weights, embedding: Tensor | Groups, tied: bool) -> Tensor | Groups:
    """Return the head's weight [vocab_size, width]: the embedding if the config ties them, else lm_head.

    `tied`: the family's default. An lm_head that differs from the embedding is used, as transformers does."""
    tied = flag(config, "tie_word_embeddings", tied)
    if tied and not weights.stored("lm_head.weight"):
        return embedding
    weight = weights.whole("lm_head.weight", int(config["vocab_size"]), embedding.shape[1])
    return embedding if tied and equal(weight, embedding) else weight


def head_and_table(
    config: Config, weights: Weights, model: Weights, shape: Shape, width: int, device: torch.device, tied: bool
) -> tuple[Head, Table]:
    embedding = model.whole("embed_tokens.weight", shape.vocab_size, width)
    predicting = output_weight(config, weights, embedding, tied)
    head = head_of(weights, predicting, shape.outputs, shape.vocab_size, device)
    return head, embedding_table(embedding, predicting, head)


def text_of(weights: Weights) -> Weights:
    """Return the weights below `model`, or below a prefix of checkpoints with a vision tower."""
    prefixes = ("model", "language_model.model", "model.language_model")
    found = (weights.below(prefix) for prefix in prefixes)
    return next((one for one in found if one.has("embed_tokens.weight")), weights.below("model"))


def optional_bias(weights: Weights, name: str, size: int, present: bool) -> Tensor | None:
    return weights(f"{name}.bias", size) if present else None


def kernel_of(linear: LinearLayer) -> Product | None:
    """Return our kernel that computes the whole linear layer, or None."""
    product = getattr(linear, "product", None)
    return product if isinstance(product, Product) else None


def guess_step(
    embed: LinearLayer,
    decoder: Decoder,
    norm: RMSNorm,
    head: Head,
    mask: Tensor | None = None,
    first: tuple[Product, Product] | None = None,
) -> GuessStep | None:
    """Return a model as one call of our kernels, or None if the kernels do not compute a part of it."""
    product, kernel = kernel_of(head.linear), norm.kernel
    rows = embed.product if isinstance(embed, Table) else None
    if product is None or kernel is None or rows is None:
        return None
    table = None if head.table is None else head.table.product
    return GuessStep(rows, decoder, kernel, product, head.ids, table, mask, first)


class Attention:
    out_name = "o_proj"  # the tensor of the output projection
    inputs = 1  # width of the input as a multiple of the model's
    # True if our kernel for all layers computes the same as this class. Each subclass must say so itself, because it
    # may compute something else.
    in_one_call = True

    def __init__(self, config: Config, shape: Shape, weights: Weights, layer: int, rotary: Rotary) -> None:
        width, (bias, out_bias) = int(config["hidden_size"]), self.biases(config)
        q_size, kv_size = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        parts = self.parts(q_size, kv_size)
        biases = [weights(f"{name}.bias", size) for name, size in parts] if bias else None
        self._qkv = weights.linear(weights.stacked(parts, self.inputs * width), torch.cat(biases) if biases else None)
        self._out = weights.row_linear(
            weights.stacked([(self.out_name, width)], q_size), optional_bias(weights, self.out_name, width, out_bias)
        )
        self._shape, self._layer, self._rotary = shape, layer, rotary
        self._scores = Scores(window=window_of(config, layer))

    def __call__(self, x: Tensor, table: tuple[Tensor, Tensor], context: ForwardContext) -> Tensor:
        projected, kv_heads = self._projected(x), self._shape.kv_heads
        places = context.cache_places(self._layer) if fuses(x.device) and self._rotary.in_one_call else None
        if places is not None and (norms := self.fused_norms) is not None:
            return self._out(places.attend(turned(projected, kv_heads, table, norms, places), self._scores))
        return self._out(context.attend(self._layer, *self._rotated(projected, table), self._scores))

    def keys_and_values(self, x: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys and values [n, kv_heads, dim] of x [n, width]."""
        return self._rotated(self._projected(x), table)[1:]

    def _projected(self, x: Tensor) -> Tensor:
        shape = self._shape
        return self._qkv(x).view(x.shape[0], shape.heads + 2 * shape.kv_heads, shape.head_dim)

    def _rotated(self, projected: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads = self._shape.heads, self._shape.kv_heads
        rotated = self._rotary(self.normalised(projected[:, : heads + kv_heads]), table)
        return rotated[:, :heads], rotated[:, heads:], projected[:, heads + kv_heads :]

    @property
    def products(self) -> tuple[Product | None, Product | None]:
        return kernel_of(self._qkv), kernel_of(self._out)

    @property
    def heads(self) -> Heads:
        shape = self._shape
        return Heads(shape.heads, shape.kv_heads, shape.head_dim, shape.head_dim**-0.5, self._scores.window)

    @property
    def fused_norms(self) -> tuple[RMSNorm, ...] | None:
        """Return the norms in `normalised` of queries and keys, or (); None if it does something else."""
        return () if type(self).normalised is Attention.normalised else None

    @staticmethod
    def parts(q_size: int, kv_size: int) -> tuple[tuple[str, int], ...]:
        """Return (name, outputs) of the tensors that project to queries, keys and values, in this order."""
        return ("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)

    @staticmethod
    def biases(config: Config) -> tuple[bool, bool]:
        """Return two flags: queries, keys and values have biases; the output projection has one."""
        bias = flag(config, "attention_bias")
        return bias, bias

    def normalised(self, qk: Tensor) -> Tensor:
        """Return queries and keys [n, heads + kv, dim] before rotation; families with norms override it."""
        return qk


class FeedForward:
    """down(silu(gate(x)) * up(x)), gate and up as one projection."""

    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")  # the tensors of that projection
    down_name = "down_proj"
    in_one_call = True  # see `Attention`

    def __init__(self, config: Config, weights: Weights, summed: bool = True) -> None:
        """Make the layer; its result is the sum over all ranks if `summed`, else this rank's part of it."""
        width = int(config["hidden_size"])
        inner = weights.share.size(int(config["intermediate_size"]), "intermediate_size")
        bias = flag(config, "mlp_bias")
        parts = [(name, 2 * inner // len(self.gate_up)) for name in self.gate_up]
        biases = [weights(f"{name}.bias", size) for name, size in parts] if bias else None
        self._gate_up = weights.linear(weights.stacked(parts, width), torch.cat(biases) if biases else None)
        self._down = (weights.row_linear if summed else weights.partial_linear)(
            weights.stacked([(self.down_name, width)], inner), optional_bias(weights, self.down_name, width, bias)
        )

    @property
    def products(self) -> tuple[Product | None, Product | None]:
        return kernel_of(self._gate_up), kernel_of(self._down)

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(silu_mul(self._gate_up(x)))


class Layer:
    """Adds attention(norm(x)) to x, then feed_forward(norm(x))."""

    def __init__(
        self,
        attention_norm: RMSNorm,
        attention: Attention,
        forward_norm: RMSNorm,
        feed_forward: Callable[[Tensor], Tensor],
    ) -> None:
        self._attention_norm, self._attention = attention_norm, attention
        self._forward_norm, self._feed_forward = forward_norm, feed_forward

    def whole(self) -> DecoderLayer | None:
        """Return the layer as our kernels take it, or None if a part has no kernel of ours."""
        first, second, feed_forward = self._attention_norm.kernel, self._forward_norm.kernel, self._feed_forward
        if type(self).__call__ is not __class__.__call__:  # type: ignore[name-defined]  # a subclass has its own
            return None
        if first is None or second is None or not isinstance(feed_forward, FeedForward):
            return None
        if not all("in_one_call" in vars(type(part)) for part in (self._attention, feed_forward)):
            return None
        products = [product for product in (*self._attention.products, *feed_forward.products) if product is not None]
        if len(products) < 4:
            return None
        norms = [norm.kernel for norm in self._attention.fused_norms or ()]
        head_norms = [norm[0] for norm in norms if norm is not None]
        if len(head_norms) < len(norms):
            return None
        return DecoderLayer((first[0], second[0]), head_norms, first[1], products, self._attention.heads)

    def __call__(self, x: Residual, table: tuple[Tensor, Tensor], context: ForwardContext) -> None:
        x.add(self._attention(x.normed(self._attention_norm), table, context))
        x.add(self._feed_forward(x.normed(self._forward_norm)))


def decoder_of(layers: Sequence[Layer], rotary: Rotary) -> Decoder | None:
    """Return the layers as one call of our kernels, or None. Heads must be rotated whole."""
    whole = [kernel for layer in layers if (kernel := layer.whole()) is not None]
    return Decoder(whole, rotary.tables) if len(whole) == len(layers) and rotary.in_one_call else None


def through_layers(
    x: Tensor,
    layers: Sequence[Callable[..., None]],
    tables: Iterable[tuple[Tensor, Tensor]],
    norm: RMSNorm,
    context: ForwardContext,
) -> Tensor:
    total = Residual(x)
    for index, (layer, table) in enumerate(zip(layers, tables, strict=False), 1):
        layer(total, table, context)
        context.keep_hidden(index, total)
    return total.normed(norm)


class Llama(Predicting):
    attention: type[Attention] = Attention
    layer: type[Layer] = Layer
    norm: type[RMSNorm] = RMSNorm
    norms: tuple[str, ...] = NORMS
    tied = False  # the default of `tie_word_embeddings`
    slides = False  # True if layers may have windows
    partly_rotated = False  # True if heads may be rotated in part
    defaults: ClassVar[Config] = {}  # values of fields that configs may leave out
    refused: tuple[str, ...] = ()  # fields of other families that must not be set
    splits = SPLITS

    def __init__(
        self, config: Config, weights: Weights, dtype: torch.dtype, device: torch.device, max_position: int
    ) -> None:
        config = self.completed(config)
        self.shape, self.dtype, self.device = weights.share.shape(shape_of(config, max_position)), dtype, device
        self.check(config)
        width, eps = int(config["hidden_size"]), number(config, "rms_norm_eps", 1e-6)
        rotations = frequencies(self.shape.head_dim, self.rope(config, FULL), max_position, self.partly_rotated)
        self._rotary = Rotary(rotations, max_position, dtype, device)
        model = text_of(weights)
        # Comes first, so that nothing else is in memory while the largest weights are packed.
        self.head, table = head_and_table(config, weights, model, self.shape, width, device, self.tied)
        self._embed = weights.embedding(table, self.shape.vocab_size)
        self._layers = [
            self._layer(config, model.below(f"layers.{index}"), index, width, eps) for index in range(self.shape.layers)
        ]
        whole = 2 * rotations.inverse.shape[0] == self.shape.head_dim and type(self).tables is Llama.tables
        self._decoder = decoder_of(self._layers, self._rotary) if whole else None
        self._norm = self.norm(model(f"{self.norms[2]}.weight", width), eps)

    @classmethod
    def completed(cls, config: Config) -> dict[str, Any]:
        """Return the config with the values of fields that it leaves out."""
        return {**cls.defaults, **config}

    def check(self, config: Config) -> None:
        """Raise `UsageError` if the config asks for what this family does not compute."""
        check_activation(config)
        refuse(config, self.refused)
        if not self.slides and config.get("sliding_window") is not None and flag(config, "use_sliding_window", True):
            raise UsageError("sliding-window attention is not supported in this family (mistral, qwen2, qwen3 have it)")
        kinds = config.get("layer_types")
        if kinds is not None and len(kinds) != self.shape.layers:
            raise UsageError(f"layer_types has {len(kinds)} layers, num_hidden_layers says {self.shape.layers}")

    def _layer(self, config: Config, weights: Weights, index: int, width: int, eps: float) -> Layer:
        first, second = (self.norm(weights(f"{name}.weight", width), eps) for name in self.norms[:2])
        return self.layer(
            first,
            self.attention(config, self.shape, weights.below("self_attn"), index, self._rotary),
            second,
            self.feed_forward(config, weights.below("mlp"), index),
        )

    def feed_forward(self, config: Config, weights: Weights, layer: int) -> Callable[[Tensor], Tensor]:
        return FeedForward(config, weights)

    def forward(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        x = self._embed(token_ids)
        context.keep_hidden(0, x)
        if self._decoder is not None and (views := context.views()) is not None:
            first, last = 0, len(self._layers)
            for stop in [n for n in range(1, last) if n in views.kept] + [last] if views.kept else [last]:
                x, first = self._decoder(x, views, first, stop), stop
                context.keep_hidden(stop, x)
            return self._norm(x)
        return through_layers(x, self._layers, self.tables(context.positions), self._norm, context)

    def rope(self, config: Config, kind: str) -> Config:
        """Return the rotary part of the config for layers of a kind."""
        return config

    def tables(self, positions: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """Return the cosines and sines of every layer at `positions` int64 [n]."""
        return repeat(self._rotary.at(positions))

    @cached_property
    def guess_step(self) -> GuessStep | None:
        changed = any(getattr(type(self), name) is not getattr(Llama, name) for name in ("forward", "logits", "scaled"))
        if changed or self._decoder is None:
            return None
        return guess_step(self._embed, self._decoder, self._norm, self.head)
