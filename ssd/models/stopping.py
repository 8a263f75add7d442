"""The token ids that end a text, from everywhere a checkpoint may name them."""

from __future__ import annotations

import json

from ssd.models.checkpoint import Checkpoint


def stop_token_ids(checkpoint: Checkpoint) -> frozenset[int]:
    """All end-of-sequence ids of config.json and generation_config.json; there may be several."""
    found: set[int] = set()
    sources = [checkpoint.config]
    path = checkpoint.directory / "generation_config.json"
    if path.is_file():
        sources.append(json.loads(path.read_text(encoding="utf-8")))
    for source in sources:
        ids = source.get("eos_token_id")
        found.update([ids] if isinstance(ids, int) else ids or [])
    return frozenset(found)
