"""The token ids that end a text, from everywhere a checkpoint may name them."""

from __future__ import annotations

from ssd.errors import UsageError
from ssd.models.checkpoint import Checkpoint, read_json


def stop_token_ids(checkpoint: Checkpoint) -> frozenset[int]:
    """All end-of-sequence ids of config.json and generation_config.json; there may be several, and some beyond the
    vocabulary. UsageError where they are no ids, and where all of them are beyond it."""
    found: set[int] = set()
    sources = [checkpoint.config]
    path = checkpoint.directory / "generation_config.json"
    if path.is_file():
        sources.append(read_json(path))
    for source in sources:
        ids = source.get("eos_token_id")
        ids = [] if ids is None else ids
        listed = ids if isinstance(ids, list) else [ids]
        if not all(type(token) is int and token >= 0 for token in listed):
            raise UsageError(f"{checkpoint.directory}: eos_token_id {ids!r} is neither a number nor a list of numbers")
        found.update(listed)
    vocabulary = range(checkpoint.count("vocab_size"))
    if found and found.isdisjoint(vocabulary):
        raise UsageError(
            f"{checkpoint.directory}: no text would ever end: eos_token_id {sorted(found)} is not in the vocabulary of "
            f"{len(vocabulary)} tokens"
        )
    return frozenset(found.intersection(vocabulary))
