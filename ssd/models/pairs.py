"""The kinds of drafts that read hidden states, and checks that a draft fits its target.

A draft of no kind in `KINDS` is an independent model. Reads configs and headers only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ssd.errors import UsageError
from ssd.models import mtp
from ssd.models.blocks import check_block, is_block
from ssd.models.checkpoint import MAX_TOKENIZER, Checkpoint, read_bounded
from ssd.models.heads import EMBEDDING, OUTPUTS, TARGET_EMBEDDING, check_head, is_head
from ssd.models.vocabularies import Vocabulary, readable, translation, vocabulary_of

# Keys of a draft's config.json: tensors that it reads from its target's files; how many ids it predicts.
SHARED, DRAFT_VOCAB = "shared_with_target", "draft_vocab_size"
_FIRST, _LAST = 2**16, 2**11  # ids of a light draft, of both ends of the vocabulary


class DraftKind(NamedTuple):
    """A kind of draft that reads hidden states of its target.

    `layers` returns after how many target layers it reads them; it raises UsageError if the draft does not fit.
    `model`: module and class. `in_family`: the class takes that of the target's family as its first argument."""

    name: str
    recognises: Callable[[Checkpoint], bool]
    layers: Callable[[Checkpoint, Checkpoint], tuple[int, ...]]
    model: str
    in_family: bool = False


def _block_layers(draft: Checkpoint, target: Checkpoint) -> tuple[int, ...]:
    return check_block(draft, target).layers


KINDS = (
    DraftKind("an MTP head", mtp.is_mtp, mtp.check_mtp, "ssd.models.mtp_head:MTPHead", in_family=True),
    DraftKind("a block drafter", is_block, _block_layers, "ssd.models.block:BlockDraft"),
    DraftKind("an EAGLE-3 head", is_head, check_head, "ssd.models.eagle3:Eagle3"),
)
"""A draft is of the first kind that recognises it."""


def draft_kind(model: Checkpoint) -> DraftKind | None:
    """Return the kind of a draft that reads hidden states; None for an independent model."""
    return next((kind for kind in KINDS if kind.recognises(model)), None)


def check_pair(target: Checkpoint, draft: Checkpoint) -> Checkpoint:
    """Return `draft` as a model that reads and predicts ids of `target`; raise UsageError if it cannot.

    It is `translated` if the tokenizers differ. Without two tokenizers the sizes of the vocabularies must be equal."""
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


def short_list(draft: Checkpoint) -> list[int] | None:
    """Return the ids that a light draft predicts; None for a draft that predicts few ids anyway.

    BPE's first ids are the commonest tokens; tokenizers put added tokens, such as the end of a turn, last."""
    known = draft.count("vocab_size")
    if known < 2 * _FIRST or DRAFT_VOCAB in draft.config or draft.translation is not None or draft_kind(draft):
        return None
    return [*range(_FIRST), *range(known - _LAST, known)]


def translated(draft: Checkpoint, size: int, vocabulary: Vocabulary | None, target: str = "the target") -> Checkpoint:
    """Return `draft` in the ids of a target that has `size` ids of a `vocabulary`.

    It is unchanged if the vocabularies are equal, or one is unknown. Raises UsageError if they share too few tokens, or
    if they differ and the draft reads tensors of its target."""
    ours = None if vocabulary is None else vocabulary_of(draft.directory)
    if vocabulary is None or ours is None or vocabulary == ours:
        return draft
    try:
        if draft_kind(draft) or draft.config.get(SHARED):
            differing = readable(min(vocabulary.items() ^ ours.items())[0])
            raise UsageError(f"it reads tensors of a model with the same tokenizer, but {differing} differs")
        found = translation(vocabulary, size, ours, draft.count("vocab_size"))
    except UsageError as error:
        raise UsageError(f"draft {draft.directory} does not fit {target}: {error}") from None
    config = draft.config | {"vocab_size": size, DRAFT_VOCAB: len(found.shared)}
    return replace(draft, config=config, translation=found)


def borrowed(draft: Checkpoint, target: Checkpoint) -> Checkpoint:
    """Return `draft` with the tensors that it shares with `target`, named in its config.

    An EAGLE-3 head without an embedding or `lm_head` gets the target's; a tied embedding serves as both. Raises
    UsageError if the target lacks one."""
    names = draft.config.get(SHARED, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"{draft.directory / 'config.json'}: {SHARED} must be a list of names")
    if draft_kind(draft) and not mtp.is_mtp(draft):
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
