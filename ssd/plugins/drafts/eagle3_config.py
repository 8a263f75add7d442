"""Recognises an EAGLE-3 head, and checks that it fits its target. Reads configs and headers only.

An EAGLE-3 head (Li et al., arXiv 2503.01840) is a Llama-like layer. Its tensors, as SafeAILab or vLLM's `speculators`
names them: `fc` fuses three hidden states, `midlayer` or `layers.0` is the layer, `lm_head` predicts `draft_vocab_size`
tokens, `d2t` is each token's id less its place. Without `lm_head` the target's rows predict."""

from __future__ import annotations

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


def lent_names(draft: Checkpoint, target: Checkpoint) -> dict[str, str]:
    """Return the target's tensors that a draft reads in place of its own, by the names of its own.

    A tied embedding serves as both."""
    outputs = OUTPUTS if OUTPUTS in target.tensors else TARGET_EMBEDDING
    lacking = {EMBEDDING: TARGET_EMBEDDING, OUTPUTS: outputs}
    return {ours: theirs for ours, theirs in lacking.items() if ours not in draft.tensors}


def check_states(draft: Checkpoint, target: Checkpoint, layers: tuple[int, ...]) -> None:
    """Raise UsageError if a draft cannot read the target's hidden states after `layers`, or predict its tokens."""
    pair = f"draft {draft.directory} does not fit target {target.directory}"
    width, ours = draft.count("target_hidden_size", draft.count("hidden_size")), target.count("hidden_size")
    if width != ours:
        raise UsageError(f"{pair}: it reads hidden states of width {width}, the target's have {ours}")
    if layers[-1] > (count := target.count("num_hidden_layers")):
        raise UsageError(f"{pair}: it reads hidden states after {layers[-1]} layers, the target has {count}")
    sizes = [model.count("vocab_size") for model in (target, draft)]
    if sizes[0] != sizes[1]:
        raise UsageError(f"{pair}: vocabularies of {sizes[0]} and {sizes[1]} tokens")
    predicted = draft.count("draft_vocab_size", sizes[1])
    if draft.tensors and predicted != sizes[1] and "d2t" not in draft.tensors:
        raise UsageError(f"{draft.directory}: tensor d2t is missing, which says what its {predicted} tokens are")


def check_head(head: Checkpoint, target: Checkpoint) -> tuple[int, ...]:
    """Return the three target layers after which the head reads; raise UsageError if it does not fit."""
    if head.config.get("model_type", "llama") != "llama":
        raise UsageError(f"{head.directory}: EAGLE-3 heads of type {head.config['model_type']!r} are not supported")
    if head.config.get("norm_before_fc"):
        raise UsageError(f"{head.directory}: norm_before_fc, a norm of the hidden states, is not supported")
    layers = _layers(head, target)
    check_states(head, target, layers)
    if more := sorted(name for name in head.tensors if name.startswith("layers.") and not name.startswith("layers.0.")):
        raise UsageError(f"{head.directory}: tensor {more[0]}: EAGLE-3 heads of more than one layer are not supported")
    width = head.count("hidden_size")
    for ours, theirs in lent_names(head, target).items() if head.tensors else ():
        if (shape := target.tensors[theirs].shape)[-1:] != (width,):
            raise UsageError(
                f"{head.directory}: it has no {ours} of its own, and the target's {theirs} has shape {shape}, not "
                f"{width} wide"
            )
    return layers


def _layers(head: Checkpoint, target: Checkpoint) -> tuple[int, ...]:
    """Return the layers of `check_head`, which configs count in two ways.

    An `eagle_config` whose first id is 1 (SGLang) names a layer by its output, any other config by the number of layers
    before it."""
    nested, shift = head.config.get("eagle_config"), 0
    ids = nested.get(LAYER_IDS) if isinstance(nested, dict) else None
    if ids is None:
        ids = head.config.get(LAYER_IDS)
    else:
        shift = int(isinstance(ids, list) and ids[:1] == [1])
    if ids is None:
        count = target.count("num_hidden_layers")
        ids = [2, count // 2, count - 3]
    if not isinstance(ids, list) or len(ids) != FUSED or any(type(layer) is not int for layer in ids):
        raise UsageError(f"{head.directory / 'config.json'}: {LAYER_IDS} must be {FUSED} layers, is {ids!r}")
    first, second, third = layers = tuple(layer + shift for layer in ids)
    if not 0 <= first < second < third:
        raise UsageError(
            f"{head.directory}: it reads hidden states after {layers} layers, which do not ascend; the target "
            f"has {target.count('num_hidden_layers')}"
        )
    return layers
