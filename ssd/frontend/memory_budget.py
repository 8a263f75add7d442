"""Bounds the memory that clients' prompts take: a limit on requests does not bound bytes."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Hashable

from ssd.errors import RequestError
from ssd.ipc.public import Generate

PEER_BYTES = 48 * 2**20
ALL_BYTES = 96 * 2**20

_ID_BYTES = 40  # of a token id in a list


class MemoryBudget:
    """Counts bytes held for clients: at most `each` for one of them and `in_all` for all."""

    def __init__(self, each: int = PEER_BYTES, in_all: int = ALL_BYTES) -> None:
        self.held = 0
        self._each, self._in_all = each, in_all
        self._peers: Counter[Hashable] = Counter()

    def take(self, peer: Hashable, size: int) -> None:
        """Count `size` more bytes for a peer. Raises RequestError `overloaded` beyond a limit.

        A prompt of any size is let in while nothing else is held."""
        for held, limit, whose in (
            (self._peers[peer], self._each, "of this client"),
            (self.held, self._in_all, "of all clients"),
        ):
            if held and held + size > limit:
                raise RequestError("overloaded", f"the prompts {whose} hold {held} of {limit} bytes already")
        self._peers[peer] += size
        self.held += size

    def grow(self, thing: Hashable, size: int) -> None:
        """Count `size` more bytes for one body. Raises RequestError `overloaded` beyond the limit of all.

        A body of any size is let in while nothing else is held."""
        if self.held > self._peers[thing] and self.held + size > self._in_all:
            raise RequestError("overloaded", f"what all clients have sent holds {self.held} of {self._in_all} bytes")
        self._peers[thing] += size
        self.held += size

    def give_back(self, peer: Hashable, size: int) -> None:
        self.held -= size
        self._peers[peer] -= size
        if self._peers[peer] <= 0:
            del self._peers[peer]

    def give_back_with(self, holder: object, peer: Hashable, size: int) -> None:
        """Give the bytes back when `holder`, which keeps them, is freed."""
        weakref.finalize(holder, self.give_back, peer, size).atexit = False


def prompt_bytes(message: Generate) -> int:
    """Return the bytes that a message takes while it waits: its prompt, and its allowed token ids."""
    texts = [] if message.messages is None else [message.chat.template_kwargs, message.chat.tools]
    for said in message.messages or ():
        texts += [said.content, said.reasoning_content, *(call.arguments for call in said.tool_calls)]
    if message.prompt is not None:
        texts.append(message.prompt)
    ids = len(message.token_ids or ()) + len(message.params.allowed_token_ids if message.params else ())
    return sum(map(sys.getsizeof, texts)) + _ID_BYTES * ids
