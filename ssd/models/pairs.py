"""Checks that a draft fits its target: tokenizers, shared tensors, EAGLE-3 heads. Reads configs and headers only.

An EAGLE-3 head (Li et al., arXiv 2503.01840) is one Llama-like layer that predicts from hidden states of its target.
Its checkpoint has the layout of SafeAILab, which SGLang and vLLM read, or of vLLM's `speculators`: `fc` fuses three
hidden states, `midlayer` (or `layers.0`) is the layer, `lm_head` predicts `draft_vocab_size` tokens, and `d2t` is the
difference between each token's id in the target and its place. A head without `lm_head` uses its target's rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ssd.errors import UsageError
from ssd.models.blocks import check_block, is_block
from ssd.models.checkpoint import MAX_TOKENIZER, Checkpoint, read_bounded
from ssd.models.layouts import KV_INJECTION
from ssd.models.vocabularies import Vocabulary, readable, translation, vocabulary_of

# Keys of a draft's config.json: tensors that it reads from its target's files; how many ids it predicts.
SHARED, DRAFT_VOCAB = "shared_with_target", "draft_vocab_size"
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


def reads_hidden(model: Checkpoint) -> bool:
    """Return True for a draft that reads hidden states of its target: a head, a block or a KV-injected drafter."""
    return is_head(model) or is_block(model)


def name_of(model: Checkpoint) -> str:
    """Return what people call such a draft."""
    if KV_INJECTION in model.config.get("architectures", ()):
        return "a KV-injected drafter"
    return "a block drafter" if is_block(model) else "an EAGLE-3 head"


def check_hidden(draft: Checkpoint, target: Checkpoint) -> tuple[int, ...]:
    """Return after how many target layers such a draft reads hidden states. Raises UsageError if it does not fit."""
    return check_block(draft, target).layers if is_block(draft) else check_head(draft, target)


def target_width(config: Mapping[str, Any]) -> int:
    """Return the width of the hidden states that a head fuses; raise KeyError if the config lacks it."""
    return int(config.get("target_hidden_size") or config["hidden_size"])


def check_head(head: Checkpoint, target: Checkpoint) -> tuple[int, ...]:
    """Return after how many target layers the head reads hidden states: low, middle, high.

    Raises UsageError if the two do not fit together."""
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

    An `eagle_config` whose first id is 1 (SGLang) names a layer by its output. All others name it by its input: the
    number of layers before it."""
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


def check_pair(target: Checkpoint, draft: Checkpoint) -> Checkpoint:
    """Return `draft` as a model that reads and predicts ids of `target`; raise UsageError if it cannot.

    Vocabularies may be padded to different sizes if the tokenizers agree. If they do not, the draft is `translated`.
    Without two tokenizers the sizes must be equal."""
    if DRAFT_VOCAB in draft.config:
        draft.count(DRAFT_VOCAB)
    pair = f"target {target.directory} and draft {draft.directory}"
    files = [model.directory / "tokenizer.json" for model in (target, draft)]
    sizes = [model.count("vocab_size") for model in (target, draft)]
    if all(file.is_file() for file in files):
        if read_bounded(files[0], MAX_TOKENIZER) == read_bounded(files[1], MAX_TOKENIZER):
            return draft
        return translated(draft, sizes[0], vocabulary_of(target.directory), f"target {target.directory}")
    if sizes[0] != sizes[1]:
        raise UsageError(f"{pair} cannot work together: vocabularies of {sizes[0]} and {sizes[1]} tokens")
    return draft


def translated(draft: Checkpoint, size: int, vocabulary: Vocabulary | None, target: str = "the target") -> Checkpoint:
    """Return `draft` in the ids of a target that has `size` ids of a `vocabulary`.

    It is unchanged if it has the same vocabulary, or if it or the target has no tokenizer. Raises UsageError if they
    share too few tokens, and for a draft with another vocabulary that reads tensors of its target."""
    ours = None if vocabulary is None else vocabulary_of(draft.directory)
    if vocabulary is None or ours is None or vocabulary == ours:
        return draft
    try:
        if reads_hidden(draft) or draft.config.get(SHARED):
            differing = readable(min(vocabulary.items() ^ ours.items())[0])
            raise UsageError(f"it reads tensors of a model with the same tokenizer, but {differing} differs")
        found = translation(vocabulary, size, ours, draft.count("vocab_size"))
    except UsageError as error:
        raise UsageError(f"draft {draft.directory} does not fit {target}: {error}") from None
    config = draft.config | {"vocab_size": size, DRAFT_VOCAB: len(found.shared)}
    return replace(draft, config=config, translation=found)


def borrowed(draft: Checkpoint, target: Checkpoint) -> Checkpoint:
    """Return `draft` with the tensors that it shares with `target`; its config names them all ("shared_with_target").

    A draft over its target's embedding needs no copy of it. An EAGLE-3 head without an embedding or `lm_head` gets the
    target's; if the target has tied them, its embedding serves as both. Raises UsageError if the target lacks one."""
    names = draft.config.get(SHARED, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"{draft.directory / 'config.json'}: {SHARED} must be a list of names")
    if reads_hidden(draft):
        outputs = OUTPUTS if OUTPUTS in target.tensors else TARGET_EMBEDDING
        lacking = {EMBEDDING: TARGET_EMBEDDING, OUTPUTS: outputs}
        names = [*names, *(theirs for ours, theirs in lacking.items() if ours not in draft.tensors)]
    for name in names:
        if name not in target.tensors:
            raise UsageError(f"draft {draft.directory} shares {name} with its target, which {target.directory} lacks")
    if not names:
        return draft
    lent = {name: target.tensors[name] for name in names}
    return replace(draft, config=draft.config | {SHARED: names}, tensors=draft.tensors | lent)
