"""The token ids that end a text, from everywhere a checkpoint may name them."""

from __future__ import annotations

from ssd.errors import UsageError
from ssd.models.checkpoint import Checkpoint, read_json


def stop_token_ids(checkpoint: Checkpoint) -> frozenset[int]:
    """All end-of-sequence ids of config.json and generation_config.json; there may be several."""
    found: set[int] = set()
    sources = [checkpoint.config]
    path = checkpoint.directory / "generation_config.json"
    if path.is_file():
        sources.append(read_json(path))
    for source in sources:
        ids = source.get("eos_token_id") or []
        listed = ids if isinstance(ids, list) else [ids]
        if not all(isinstance(token, int) for token in listed):
            raise UsageError(f"{checkpoint.directory}: eos_token_id {ids!r} is neither a number nor a list of numbers")
        found.update(listed)
    return frozenset(found)
