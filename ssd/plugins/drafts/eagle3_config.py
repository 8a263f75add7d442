"""Recognises an EAGLE-3 head, and checks that it fits its target. Reads configs and headers only.

An EAGLE-3 head (Li et al., arXiv 2503.01840) is a Llama-like layer. Its tensors, as SafeAILab or vLLM's `speculators`
names them: `fc` fuses three hidden states, `midlayer` or `layers.0` is the layer, `lm_head` predicts `draft_vocab_size`
tokens, `d2t` is each token's id less its place. Without `lm_head` the target's rows predict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ssd.errors import UsageError
from ssd.models.checkpoint import Checkpoint

# A head's embedding, and the target's, which a head without its own reads.
EMBEDDING, TARGET_EMBEDDING = "embed_tokens.weight", "model.embed_tokens.weight"
# The last layer: a head's own has one row for each token it predicts, its target's has a row for every token.
OUTPUTS = "lm_head.weight"
LAYER_NAMES = ("midlayer", "layers.0")
FUSED = 3
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def is_head(model: Checkpoint) -> bool:
    """Return True for an EAGLE-3 head, by its config or, in older checkpoints, by its tensors."""
    names = model.config.get("architectures")
    named = isinstance(names, list) and any("eagle3" in str(name).lower() for name in names)
    return named or any(f"{layer}.hidden_norm.weight" in model.tensors for layer in LAYER_NAMES)


def target_width(config: Mapping[str, Any]) -> int:
    """Return the width of the hidden states that a head fuses; raise KeyError if the config lacks it."""
    return int(config.get("target_hidden_size") or config["hidden_size"])


def check_head(head: Checkpoint, target: Checkpoint) -> tuple[int, ...]:
    """Return the three target layers after which the head reads; raise UsageError if it does not fit."""
    if head.config.get("model_type", "llama") != "llama":
        raise UsageError(f"{head.directory}: EAGLE-3 heads of type {head.config['model_type']!r} are not supported")
    if head.config.get("norm_before_fc"):
        raise UsageError(f"{head.directory}: norm_before_fc, a norm of the hidden states, is not supported")
    pair = f"EAGLE-3 head {head.directory} does not fit target {target.directory}"
    for key in ("hidden_size", "target_hidden_size"):
        if type(width := head.config.get(key)) is not int and (key == "hidden_size" or width is not None):
            raise UsageError(f"{head.directory / 'config.json'}: {key} must be a number, is {width!r}")
    ours, theirs = target.config.get("hidden_size"), target_width(head.config)
    if ours != theirs:
        raise UsageError(f"{pair}: it fuses hidden states of width {theirs}, the target's have {ours}")
    sizes = [model.config.get("vocab_size") for model in (target, head)]
    if sizes[0] != sizes[1]:
        raise UsageError(f"{pair}: vocabularies of {sizes[0]} and {sizes[1]} tokens")
    if head.tensors:
        _check_tensors(head, target, pair)
    return _layers(head, target, pair)


def _check_tensors(head: Checkpoint, target: Checkpoint, pair: str) -> None:
    if more := sorted(name for name in head.tensors if name.startswith("layers.") and not name.startswith("layers.0.")):
        raise UsageError(f"{head.directory}: tensor {more[0]}: EAGLE-3 heads of more than one layer are not supported")
    predicted = head.config.get("draft_vocab_size") or head.config["vocab_size"]
    if "d2t" not in head.tensors and predicted != head.config["vocab_size"]:
        raise UsageError(f"{head.directory}: tensor d2t is missing, which says what its {predicted} tokens are")
    embedding = head.tensors.get(EMBEDDING) or target.tensors.get(TARGET_EMBEDDING)
    if embedding is None:
        raise UsageError(f"{pair}: neither has an embedding that it can read ({EMBEDDING}, {TARGET_EMBEDDING})")
    if EMBEDDING not in head.tensors and embedding.shape[-1:] != (head.config["hidden_size"],):
        raise UsageError(
            f"{pair}: it has no embedding of its own, and the target's has shape {embedding.shape}, "
            f"not {head.config['hidden_size']} wide"
        )
    if OUTPUTS in head.tensors:
        return
    table = target.tensors.get(OUTPUTS) or target.tensors.get(TARGET_EMBEDDING)
    if table is None:
        raise UsageError(f"{pair}: it has no {OUTPUTS}, and the target has neither that nor {TARGET_EMBEDDING}")
    if table.shape[-1:] != (head.config["hidden_size"],):
        raise UsageError(
            f"{pair}: it has no {OUTPUTS} of its own, and the target's has shape {table.shape}, "
            f"not {head.config['hidden_size']} wide"
        )


def _layers(head: Checkpoint, target: Checkpoint, pair: str) -> tuple[int, ...]:
    """Return the layers of `check_head`, which configs count in two ways.

    An `eagle_config` whose first id is 1 (SGLang) names a layer by its output, any other config by the number of layers
    before it."""
    count = target.config.get("num_hidden_layers")
    if type(count) is not int:
        raise UsageError(f"{target.directory / 'config.json'}: num_hidden_layers must be a number, is {count!r}")
    nested = head.config.get("eagle_config")
    ids = nested.get(LAYER_IDS) if isinstance(nested, dict) else None
    if ids is None:
        ids, shift = head.config.get(LAYER_IDS), 0
    else:
        shift = int(isinstance(ids, list) and ids[:1] == [1])
    if ids is None:
        ids = [2, count // 2, count - 3]
    if not isinstance(ids, list) or len(ids) != FUSED or any(type(layer) is not int for layer in ids):
        raise UsageError(f"{head.directory / 'config.json'}: {LAYER_IDS} must be {FUSED} layers, is {ids!r}")
    layers = tuple(layer + shift for layer in ids)
    if not (0 <= layers[0] < layers[1] < layers[2] <= count):
        raise UsageError(f"{pair}: it reads the hidden states after {layers} layers, the target has {count}")
    return layers
