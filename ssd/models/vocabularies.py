"""Translates a draft's vocabulary into another one of its target.

The draft predicts only tokens that both have (token-level intersection, Timor et al., arXiv 2502.05202)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ssd.errors import UsageError
from ssd.models.checkpoint import MAX_TOKENIZER, Translation, read_bounded

LEAST_SHARE = 0.25
"""The share of the smaller vocabulary that both must have."""
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A token that stands for one byte (byte fallback)."""

_SPECIAL = "\uffff"  # marks a special token; other tokens have no character beyond U+00FF
_LONGEST = 64  # most characters of a suffix that may stand for a token

Vocabulary = Mapping[str, int]
"""Token -> id. Tokens of all tokenizers are spelled in one way: a character for each byte, special ones marked."""


def byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary (GPT-2).

    Printable Latin-1 stands for itself, other bytes follow from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def vocabulary_of(directory: Path) -> dict[str, int] | None:
    """Return the vocabulary of tokenizer.json; None if there is no file, UsageError for a bad one.

    A byte-fallback token is left out if another token has the same byte."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    content = read_bounded(file, MAX_TOKENIZER)
    try:
        tokenizer = Tokenizer.from_buffer(content)
        written = dict(tokenizer.get_vocab(with_added_tokens=True))
        special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        decoder = tokenizer.decoder
        bytewise, fallback, spaced = (
            decoder is not None and decoder.decode([token]) == text
            for token, text in (("aĠ", "a "), ("<0x41>", "A"), ("a▁b", "a b"))
        )
    except Exception as error:  # the library raises bare Exception
        raise UsageError(f"cannot read {file}: {error}") from error
    alphabet, found, single = byte_alphabet(), dict[str, int](), dict[str, int]()
    latin = {ord(character): byte for character, byte in alphabet.items()}
    for token, number in written.items():
        if number in special:
            found[_SPECIAL + token] = number
        elif fallback and (byte := BYTE.fullmatch(token)):
            single[chr(int(byte[1], 16))] = number
        elif bytewise and alphabet.keys() >= set(token):
            found[token.translate(latin)] = number
        else:
            plain = token.replace("▁", " ") if spaced else token
            found[plain.encode(errors="replace").decode("latin-1")] = number
    return single | found


def translation(theirs: Vocabulary, size: int, ours: Vocabulary, known: int) -> Translation:
    """Return the translation for a draft with `known` ids of `ours`, a target with `size` of `theirs`.

    Raises UsageError if they share too few tokens."""
    target = {number: token for token, number in theirs.items() if number < size}
    draft = {token: number for token, number in ours.items() if number < known}
    shared = sorted(number for number, token in target.items() if token in draft)
    smaller = min(len(target), len(draft)) or 1
    lacking = next((target[number] for number in sorted(target) if target[number] not in draft), "")
    share = f"{len(shared) / smaller:.1%} of the smaller vocabulary ({len(shared)} of {smaller} tokens)"
    if len(shared) < LEAST_SHARE * smaller or not shared:
        least = f"at least {LEAST_SHARE:.0%} are needed"
        raise UsageError(f"they share {share}, {least}; the draft has no {readable(lacking)}, for one")
    own = [_standing_for(target.get(number, ""), draft) for number in range(size)]
    more = f"; the draft has no {readable(lacking)}, for one" if lacking else ""
    return Translation(known, own, shared, f"they share {share}{more}")


def _standing_for(token: str, draft: Vocabulary) -> int:
    """Return the draft's id of a token, else of its longest suffix, which predicts most, else 0."""
    if token in draft:
        return draft[token]
    text = token.removeprefix(_SPECIAL)
    if token != text:
        text = text.encode(errors="replace").decode("latin-1")
    ends = (text[start:] for start in range(max(0, len(text) - _LONGEST), len(text)))
    return next((draft[end] for end in ends if end in draft), 0)


def readable(token: str) -> str:
    special = token.removeprefix(_SPECIAL)
    text = special if special != token else token.encode("latin-1", "replace").decode(errors="replace")
    return f"{text!r:.80}"
