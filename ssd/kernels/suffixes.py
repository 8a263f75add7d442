"""A memory of texts in bounded bytes, which finds what followed the end of a text before (suffixes.c)."""

from __future__ import annotations

import ctypes
import mmap
from array import array
from collections.abc import Sequence
from ctypes import byref
from typing import NamedTuple

from ssd.kernels import library
from ssd.kernels.library import address, call

LONGEST = library.SUFFIX_TAIL
"""A match of as many tokens or more counts as one of this length."""
_BLOCK, _HEADER = 64, 32  # as in suffixes.c: tokens and bytes
_OF_TOKEN = 12  # bytes: a token and two links


class Continuation(NamedTuple):
    """The `tokens` that followed an earlier occurrence of the last `matching` tokens.

    `votes[2 * i]` of `votes[2 * i + 1]` occurrences that agree so far have tokens[i] next."""

    tokens: list[int]
    matching: int
    votes: list[int]


class SuffixStore:
    """Keeps the newest tokens of all texts in at most `size` bytes, 16 to 21 a token, by compiled kernels.

    Raises ValueError without room for a block of 64 tokens, OSError if the system gives less."""

    def __init__(self, size: int) -> None:
        heads = 1 << max(0, (size // (_OF_TOKEN + 8)).bit_length() - 1)
        self._blocks = (size - 8 * heads) // (_OF_TOKEN * _BLOCK + _HEADER)
        if self._blocks < 1:
            raise ValueError(f"{size} bytes have no room for {_BLOCK} tokens")
        tokens = self._blocks * _BLOCK
        sizes = [4 * tokens, 4 * tokens, 4 * tokens, 4 * heads, 4 * heads, self._blocks * _HEADER]
        self._memory = [mmap.mmap(-1, size) for size in sizes]
        first, *links_and_heads, headers = (address_of(part) for part in self._memory)
        pair = ctypes.c_void_p * 2
        links, tops = pair(*links_and_heads[:2]), pair(*links_and_heads[2:])
        self.struct = library.Suffixes(self._blocks, self._blocks + 1, heads - 1, first, links, tops, headers)
        self.capacity = tokens

    def text(self, scope: int) -> StoredText:
        return StoredText(self, scope)


class StoredText:
    """A text of a `SuffixStore`, which may grow even when the ring has dropped its first tokens."""

    def __init__(self, store: SuffixStore, scope: int) -> None:
        self._store, self._text = store, library.SuffixText(scope)
        self._references = byref(store.struct), byref(self._text)

    def __len__(self) -> int:
        return int(self._text.length)

    def begin(self, tokens: Sequence[int]) -> None:
        """Take the first tokens that texts of the scope have, but the last 32, before anything is added.

        `len` says how many: 0, or at least 64."""
        numbers = array("i", tokens)
        call().suffixes_begin(*self._references, address(numbers), len(numbers))

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens, below 2^31."""
        numbers = array("i", tokens)
        call().suffixes_add(*self._references, address(numbers), len(numbers))

    def find(self, count: int) -> Continuation | None:
        """Return at most `count` tokens that followed the longest known end of the text, 3 tokens or more."""
        made, longest = array("i", bytes(12 * count)), ctypes.c_int64()
        first = address(made)
        found = call().suffixes_find(*self._references, count, first, first + 4 * count, byref(longest))
        if not found:
            return None
        numbers = made.tolist()
        return Continuation(numbers[:found], longest.value, numbers[count : count + 2 * found])


def address_of(memory: mmap.mmap) -> int:
    """Return where memory begins. It must not be closed while the address is used."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
