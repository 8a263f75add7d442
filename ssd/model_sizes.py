"""What of a model's config.json decides how much memory it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ssd.errors import UsageError
from ssd.models.checkpoint import Checkpoint


@dataclass(frozen=True)
class ModelSizes:
    """`inner` is the width of a feed-forward, of which a layer has `experts`."""

    vocab_size: int
    context: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    experts: int
    tied: bool

    @classmethod
    def of(cls, model: Checkpoint) -> ModelSizes:
        """Raises UsageError for what is missing or no positive number."""
        heads = _positive(model, "num_attention_heads")
        width = _positive(model, "hidden_size", heads)
        inner = _positive(model, "intermediate_size", 4 * width)
        return cls(
            vocab_size=_positive(model, "vocab_size"),
            context=_positive(model, "max_position_embeddings"),
            width=width,
            layers=_positive(model, "num_hidden_layers"),
            heads=heads,
            kv_heads=_positive(model, "num_key_value_heads", heads),
            head_dim=_positive(model, "head_dim", width // heads),
            inner=_positive(model, "moe_intermediate_size", inner),
            experts=_positive(model, "num_experts", 1),
            tied=bool(model.config.get("tie_word_embeddings", False)),
        )

    @property
    def kv_values_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim

    def parameters(self) -> int:
        """Numbers in the matrices of a decoder of the usual kind, for what has no tensors to count."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        layer = self.width * (attention + 3 * self.experts * self.inner)
        return self.layers * layer + (1 if self.tied else 2) * self.vocab_size * self.width


def weights(model: Checkpoint) -> int:
    """How many numbers a model consists of: those of its tensors, if they were looked at."""
    if not model.tensors:
        return ModelSizes.of(model).parameters()
    return sum(math.prod(tensor.shape) for tensor in model.tensors.values())


def _positive(model: Checkpoint, key: str, default: int | None = None) -> int:
    value = model.config.get(key)
    value = default if value is None else value
    if type(value) is not int or value <= 0:
        raise UsageError(f"{model.directory / 'config.json'}: {key} must be a positive number, is {value!r}")
    return value
