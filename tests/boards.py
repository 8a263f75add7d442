"""Looks up outcomes on a board for their ids alone, and prepares some."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ssd.config.params import MAX_LOOKAHEAD
from ssd.ipc.board import BoardReader, Key, Place, Prepared


def lookup(reader: BoardReader, slot: int, key: Key, most: int = MAX_LOOKAHEAD) -> list[int] | None:
    """Return the ids cached for an outcome, at most `most`; None on a miss."""
    found = reader.find(slot, key, most)
    return None if found is None else found.ids


def prepared(
    entries: Iterable[int], keys: Sequence[Key], found: Iterable[Sequence[int]], places: Sequence[Place] = ()
) -> list[Prepared]:
    """Return what is to be published, of one number, key and list of ids for each entry."""
    known = places or [Place(0, 0)] * len(keys)
    return [Prepared(*each) for each in zip(entries, keys, found, known, strict=True)]
