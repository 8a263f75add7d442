"""Looks up outcomes on a board for their ids alone."""

from __future__ import annotations

from ssd.config.params import MAX_LOOKAHEAD
from ssd.ipc.board import BoardReader, Key


def lookup(reader: BoardReader, slot: int, key: Key, most: int = MAX_LOOKAHEAD) -> list[int] | None:
    """Return the ids cached for an outcome, at most `most`; None on a miss."""
    found = reader.find(slot, key, most)
    return None if found is None else found.ids
