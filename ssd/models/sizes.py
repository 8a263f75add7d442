"""Reads the sizes in config.json that decide how much memory a model takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from ssd.errors import UsageError
from ssd.models.checkpoint import Checkpoint
from ssd.models.draft_kinds import draft_kind
from ssd.models.layer_kinds import CONVOLUTION, LINEAR
from ssd.system.registered import SIZES, load, names

MOST = {"layers": 10_000, "heads": 10_000, "kv_heads": 10_000, "head_dim": 4096}
"""Upper bounds, more than any model has."""
_UNLIMITED = 2**20  # tokens of a context that the model itself does not limit
STEP_BYTES = 4
"""Bytes behind the codes of a head in a KV cache of int8 (`ssd.execution.kv_cache`)."""


class RecurrentSizes(NamedTuple):
    """Numbers of all recurrent layers: in the `state` of a sequence, and in the `change` of a token."""

    state: int = 0
    change: int = 0

    def nbytes(self, sequences: int, tokens: int) -> int:
        """Return the bytes of states of running `sequences` and at page boundaries, and of `tokens`' changes."""
        return 4 * ((sequences + saved_states(sequences)) * self.state + tokens * self.change)


def saved_states(sequences: int) -> int:
    """Return how many states at page boundaries are kept beside those of running sequences."""
    return max(8, 2 * sequences)


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model; `inner` is the width of a feed-forward, of which a layer has `experts`.

    `stored`: (kv_heads, head_dim) of each layer with keys and values of its own."""

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
    stored: tuple[tuple[int, int], ...]
    recurrent: RecurrentSizes

    @classmethod
    def of(cls, model: Checkpoint) -> ModelSizes:
        """Read the sizes from a config; raise UsageError if one is missing or no positive number."""
        mamba, mla = "state_size" in model.config, model.config.get("kv_lora_rank") is not None
        heads = model.count("num_attention_heads", 1 if mamba else None, MOST["heads"])
        width = model.count("hidden_size", heads)
        inner = model.count("intermediate_size", 4 * width)
        layers = model.count("num_hidden_layers", most=MOST["layers"])
        attending, recurrent = _recurrent(model, width, layers)
        kv_heads = model.count("num_key_value_heads", heads, MOST["kv_heads"])
        head_dim = model.count("head_dim", width // heads, MOST["head_dim"])
        if mla:  # one size for keys and values: no head is absorbed
            key_dim = model.count("qk_nope_head_dim") + model.count("qk_rope_head_dim")
            kv_heads, head_dim = heads, max(key_dim, model.count("v_head_dim"))
        stored = ((kv_heads, head_dim),) * attending
        found = cls(
            vocab_size=model.count("vocab_size"),
            context=model.count("max_position_embeddings", _UNLIMITED if mamba else None),
            width=width,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            inner=model.count("moe_intermediate_size", inner),
            experts=model.count("num_experts", 1),
            tied=bool(model.config.get("tie_word_embeddings", False)),
            stored=stored,
            recurrent=recurrent,
        )
        kind = str(model.config.get("model_type"))
        return load(SIZES, kind)(found, model) if kind in names(SIZES) else found

    @property
    def kv_values_per_token(self) -> int:
        return 2 * sum(heads * dim for heads, dim in self.stored)

    @property
    def kv_cells_per_token(self) -> int:
        """Return how many heads of keys and of values a token has, over all layers."""
        return 2 * sum(heads for heads, _ in self.stored)

    def parameters(self) -> int:
        """Count the weights of a usual decoder, for a checkpoint without tensors to count."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        layer = self.width * (attention + 3 * self.experts * self.inner)
        return self.layers * layer + (1 if self.tied else 2) * self.vocab_size * self.width


def _recurrent(model: Checkpoint, width: int, layers: int) -> tuple[int, RecurrentSizes]:
    """Return how many layers attend, and the sizes of the others. Defaults are those of the families."""
    family, kinds = str(model.config.get("model_type")), model.config.get("layer_types") or ()
    if not isinstance(kinds, list | tuple):
        raise UsageError(f"{model.directory / 'config.json'}: layer_types must be a list, is {kinds!r}")
    count = sum(kind in (LINEAR, CONVOLUTION) for kind in kinds)
    if family == "qwen3_next" or family.startswith("qwen3_5"):
        if not kinds:
            count = layers - layers // model.count("full_attention_interval", 4)
        heads, key_dim = model.count("linear_num_value_heads", 32), model.count("linear_key_head_dim", 128)
        values = heads * model.count("linear_value_head_dim", 128)
        queries = key_dim * model.count("linear_num_key_heads", 16)
        inputs, window = 2 * queries + values, model.count("linear_conv_kernel_dim", 4)
        own = RecurrentSizes(key_dim * values + (window - 1) * inputs, 2 * inputs - queries + 2 * heads)
    else:
        own = convolution_sizes(model, width)
    return layers - count, RecurrentSizes(count * own.state, count * own.change)


def convolution_sizes(model: Checkpoint, width: int) -> RecurrentSizes:
    """Return the sizes of a layer with a short convolution, which keeps its last inputs."""
    return RecurrentSizes((model.count("conv_L_cache", 3) - 1) * width, width)


def weights(model: Checkpoint) -> int:
    if not model.tensors:
        return ModelSizes.of(model).parameters()
    return draft_kind(model).repeated(model) + sum(math.prod(info.shape) for info in model.tensors.values())
