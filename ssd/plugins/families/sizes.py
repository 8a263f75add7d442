"""Memory of families whose layers differ in size, read from config.json."""

from __future__ import annotations

from dataclasses import replace

from ssd.errors import UsageError
from ssd.models.checkpoint import Checkpoint
from ssd.models.layer_kinds import FULL, SLIDING
from ssd.models.sizes import MOST, ModelSizes, RecurrentSizes, convolution_sizes
from ssd.system import fields
from ssd.system.fields import Config


def gemma4_sizes(usual: ModelSizes, model: Checkpoint) -> ModelSizes:
    return replace(usual, stored=tuple(gemma4_layers(model.config)[1]))


def gemma4_layers(config: Config) -> tuple[list[str], list[tuple[int, int]]]:
    """Return a Gemma 4's kind of every layer, and (kv_heads, head_dim) of those with keys of their own.

    Layers with keys of their own come first. transformers writes what differs by layer into `per_layer_config`; the
    last layer is always global, as there."""
    layers, name = fields.count(config, "num_hidden_layers", most=MOST["layers"]), "num_kv_shared_layers"
    shared = fields.count(config, name, most=layers - 1) if config.get(name) else 0
    kinds = list(config.get("layer_types") or (([SLIDING] * 5 + [FULL]) * layers)[:layers])
    kinds[-1] = FULL
    own = kinds[: layers - shared]
    if len(kinds) != layers or not set(kinds) <= {FULL, SLIDING} or set(own) != set(kinds):
        raise UsageError(
            f"layer_types must be {layers} of {FULL} and {SLIDING}, and each kind have a layer that is none of the "
            f"{shared} last ones ({name})"
        )
    heads, dim = fields.count(config, "num_key_value_heads"), fields.count(config, "head_dim", 256)
    wide = fields.count(config, "global_head_dim", 512)
    few = fields.count(config, "num_global_key_value_heads", heads) if config.get("attention_k_eq_v") else heads
    if config.get("per_layer_config") is None:
        return kinds, [(few, wide) if kind == FULL else (heads, dim) for kind in own]
    given = fields.mapping(config, "per_layer_config")
    each = [fields.mapping(given, str(index)) for index in range(layers)]
    if strange := {field for one in each for field in one} - {"num_key_value_heads", "head_dim"}:
        raise UsageError(f"per_layer_config with {min(strange)} is not supported in this family")
    sizes = [(fields.count(one, "num_key_value_heads", heads), fields.count(one, "head_dim", dim)) for one in each]
    return kinds, sizes[: len(own)]


def lfm2_sizes(usual: ModelSizes, model: Checkpoint) -> ModelSizes:
    """Return the sizes of an LFM2, whose old configs list the layers that attend."""
    full = model.config.get("full_attn_idxs")
    if model.config.get("layer_types") or not isinstance(full, list):
        return usual
    count = usual.layers - len(set(map(str, full)))
    own = convolution_sizes(model, usual.width)
    recurrent = RecurrentSizes(count * own.state, count * own.change)
    return replace(usual, stored=usual.stored[: usual.layers - count], recurrent=recurrent)
