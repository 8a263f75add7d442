"""Checks that a draft fits its target. Reads configs and headers only."""

from __future__ import annotations

from dataclasses import replace

from ssd.errors import UsageError
from ssd.models.checkpoint import MAX_TOKENIZER, Checkpoint, read_bounded
from ssd.models.draft_kinds import PLAIN, draft_kind
from ssd.models.vocabularies import Vocabulary, readable, translation, vocabulary_of

# Keys of a draft's config.json: tensors that it reads from its target's files; how many ids it predicts.
SHARED, DRAFT_VOCAB = "shared_with_target", "draft_vocab_size"
_FIRST, _LAST = 2**16, 2**11  # ids of a light draft, of both ends of the vocabulary


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
    if known < 2 * _FIRST or DRAFT_VOCAB in draft.config or draft.translation is not None:
        return None
    if draft_kind(draft) is not PLAIN:
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
        if draft_kind(draft) is not PLAIN or draft.config.get(SHARED):
            differing = readable(min(vocabulary.items() ^ ours.items())[0])
            raise UsageError(f"it reads tensors of a model with the same tokenizer, but {differing} differs")
        found = translation(vocabulary, size, ours, draft.count("vocab_size"))
    except UsageError as error:
        raise UsageError(f"draft {draft.directory} does not fit {target}: {error}") from None
    config = draft.config | {"vocab_size": size, DRAFT_VOCAB: len(found.shared)}
    return replace(draft, config=config, translation=found)


def borrowed(draft: Checkpoint, target: Checkpoint) -> Checkpoint:
    """Return `draft` with the tensors that it shares with `target`: by its config and its kind.

    Raises UsageError if the target lacks one."""
    names = draft.config.get(SHARED, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"{draft.directory / 'config.json'}: {SHARED} must be a list of names")
    names = [*names, *draft_kind(draft).borrows(draft, target)]
    for name in names:
        if name not in target.tensors:
            raise UsageError(f"draft {draft.directory} shares {name} with its target, which {target.directory} lacks")
    if not names:
        return draft
    lent = {name: target.tensors[name] for name in names}
    return replace(draft, config=draft.config | {SHARED: names}, tensors=draft.tensors | lent)
