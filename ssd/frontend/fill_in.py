"""Prompts for the text between two texts (fill in the middle), by the special tokens of code models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec


class Marks(NamedTuple):
    """The tokens of one family of code models.

    A prompt is `prefix`, the text before, `suffix`, the text after and `middle`, or with `suffix_first` both texts in
    the other order. A `file` mark begins other files, a `repository` mark all of them. All marks end an answer, and so
    do `ends`."""

    prefix: str
    suffix: str
    middle: str = ""
    file: tuple[str, ...] = ()
    repository: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    suffix_first: bool = False

    @property
    def all(self) -> tuple[str, ...]:
        return (self.prefix, self.suffix, *filter(None, [self.middle]), *self.file, *self.repository, *self.ends)


_FILES = ("<|file_sep|>", "<|filename|>", "<|file_separator|>"), ("<|repo_name|>", "<|reponame|>")
_STAR_FILES = ("<file_sep>", "<filename>"), ("<repo_name>", "<reponame>")
_FORMATS = (
    # Qwen 2.5 and 3 Coder, Granite, CodeGemma; then StarCoder, CodeLlama, DeepSeek Coder, Codestral.
    Marks(
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", *_FILES),
        ends=("<|fim_pad|>", "<|endoftext|>", "<|end_of_text|>"),
    ),
    Marks(*("<fim_prefix>", "<fim_suffix>", "<fim_middle>", *_STAR_FILES), ends=("<fim_pad>", "<|endoftext|>")),
    Marks("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),
    Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", ends=("<|EOT|>", "<｜end▁of▁sentence｜>")),
    Marks("[PREFIX]", "[SUFFIX]", "", suffix_first=True),
)


class File(msgspec.Struct, frozen=True):
    name: str
    text: str


class FillIn:
    """Makes prompts for the marks that a tokenizer has, whose `vocabulary` has the ids of tokens by their texts.

    `encode` returns ids without special tokens. Every prompt begins with the ids `begin`."""

    def __init__(
        self, marks: Marks, vocabulary: Mapping[str, int], encode: Callable[[str], list[int]], begin: Sequence[int]
    ) -> None:
        self._vocabulary, self._encode, self._begin = vocabulary, encode, begin
        self._prefix, self._suffix = vocabulary[marks.prefix], vocabulary[marks.suffix]
        self._middle = [vocabulary[marks.middle]] if marks.middle else []
        self._file, self._repository = self._first(marks.file), self._first(marks.repository)
        self._suffix_first = marks.suffix_first
        self.ends = frozenset(vocabulary[text] for text in marks.all if text in vocabulary)
        """The ids that end an answer."""

    def _first(self, texts: Sequence[str]) -> list[int]:
        return [self._vocabulary[text] for text in texts if text in self._vocabulary][:1]

    def ids(self, prefix: str, suffix: str, files: Sequence[File] = (), most: int | None = None) -> list[int]:
        """Return the prompt for the text between `prefix` and `suffix`.

        A prompt of more than `most` ids loses files, the first ones first, then the outer ends of both texts: a quarter
        of the ids may be those of `suffix`."""
        before, after = self._encode(prefix), self._encode(suffix)
        others = [self._other(file) for file in files]
        if most is not None:
            room = max(0, most - len(self._begin) - len(self._middle) - 2)
            after = after[: max(room // 4, room - len(before))]
            before = before[max(0, len(before) + len(after) - room) :]
            while others and len(self._around(others)) > room - len(before) - len(after):
                others = others[1:]
        marked = [[self._prefix, *before], [self._suffix, *after]]
        own = [*marked[self._suffix_first], *marked[not self._suffix_first], *self._middle]
        return [*self._begin, *self._around(others), *own]

    def _other(self, file: File) -> list[int]:
        return [*self._file, *self._encode(f"{file.name}\n{file.text}\n" if self._file else f"{file.text}\n\n")]

    def _around(self, others: Sequence[list[int]]) -> list[int]:
        if not others:
            return []
        begin = [*self._repository, *self._encode("repository\n")] if self._repository else []
        end = [*self._file, *self._encode("file\n")] if self._file else []
        return [*begin, *(token for other in others for token in other), *end]


def fill_in(
    vocabulary: Mapping[str, int], encode: Callable[[str], list[int]], begin: Callable[[], Sequence[int]]
) -> FillIn | None:
    for marks in _FORMATS:
        if all(text in vocabulary for text in (marks.prefix, marks.suffix, marks.middle) if text):
            return FillIn(marks, vocabulary, encode, begin())
    return None
