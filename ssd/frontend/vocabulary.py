"""The text of each token: all that the frontend itself keeps of a tokenizer. Made by `ssd.frontend.tokenization`."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

# What a token adds to a text that it begins, and to one that goes on with it.
Piece: TypeAlias = tuple[bytes, bytes]
_NOTHING: Piece = (b"", b"")


class Vocabulary(msgspec.Struct, frozen=True):
    """Bytes by token id. Empty for a model without a tokenizer, which serves token ids only.

    `pieces`: what each token adds to a text. `first`: what it adds at the beginning of a text, where that differs.
    `silent`: special tokens, which add nothing. `longest_token`: characters of the longest token as the tokenizer's
    file writes it, at least 1. `has_chat`: the model has a chat template; where it cannot be used, `no_chat` says why.
    """

    pieces: dict[int, bytes] = {}
    first: dict[int, bytes] = {}
    silent: frozenset[int] = frozenset()
    longest_token: int = 1
    has_chat: bool = False
    no_chat: str = ""

    def piece(self, token_id: int) -> str:
        """The text of one token by itself, special ones by their name; bytes that are no character as \\xNN."""
        return self.piece_bytes(token_id).decode("utf-8", "backslashreplace")

    def piece_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for after others; empty for ids without a token."""
        return self.pieces.get(token_id, b"")

    def added_bytes(self, token_id: int) -> Piece:
        """What one token adds to a text as its first and as a later one: nothing if it is special."""
        if token_id in self.silent:
            return _NOTHING
        later = self.pieces.get(token_id, b"")
        return self.first.get(token_id, later), later
