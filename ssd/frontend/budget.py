"""How much memory the prompts of all clients may take: a bound on requests is none on bytes."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Hashable

from ssd.errors import RequestError
from ssd.ipc.messages import Generate

PEER_BYTES = 48 * 2**20
ALL_BYTES = 96 * 2**20

_ID_BYTES = 40  # of a token id in a list


class Budget:
    """Bytes that are held for clients, at most `each` for one of them and `in_all` for all together."""

    def __init__(self, each: int = PEER_BYTES, in_all: int = ALL_BYTES) -> None:
        self.held = 0
        self._each, self._in_all = each, in_all
        self._peers: Counter[Hashable] = Counter()

    def take(self, peer: Hashable, size: int) -> None:
        """Count `size` more bytes for a peer; RequestError `overloaded` where that is beyond a limit. One thing of any
        size is let in where nothing else is held."""
        for held, limit, whose in (
            (self._peers[peer], self._each, "of this client"),
            (self.held, self._in_all, "of all clients"),
        ):
            if held and held + size > limit:
                raise RequestError("overloaded", f"the prompts {whose} hold {held} of {limit} bytes already")
        self._peers[peer] += size
        self.held += size

    def grow(self, thing: Hashable, size: int) -> None:
        """Count `size` more bytes for one thing, which may be of any size where nothing else is held; RequestError
        `overloaded` where all together are beyond their limit."""
        if self.held > self._peers[thing] and self.held + size > self._in_all:
            raise RequestError("overloaded", f"what all clients have sent holds {self.held} of {self._in_all} bytes")
        self._peers[thing] += size
        self.held += size

    def give_back(self, peer: Hashable, size: int) -> None:
        """Count `size` bytes less for a peer, or a thing; they were counted by `take` or `grow`."""
        self.held -= size
        self._peers[peer] -= size
        if self._peers[peer] <= 0:
            del self._peers[peer]

    def give_back_with(self, holder: object, peer: Hashable, size: int) -> None:
        """Call `give_back` when `holder`, which keeps the bytes, is freed."""
        weakref.finalize(holder, self.give_back, peer, size).atexit = False


def prompt_bytes(message: Generate) -> int:
    """What the prompt of a message takes in memory."""
    texts = [said.content for said in message.messages or ()]
    if message.prompt is not None:
        texts.append(message.prompt)
    return sum(map(sys.getsizeof, texts)) + _ID_BYTES * len(message.token_ids or ())
