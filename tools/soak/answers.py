"""Judges whether an answer is the one that the same request got in mode `ar`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Verdict = Literal["right", "duplicated", "altered"]


class Answer(NamedTuple):
    """Everything a client gets for a request that ends by itself."""

    ids: list[int]
    text: str
    finish_reason: str


@dataclass(slots=True)
class Heard:
    """What has come for a request so far: the tokens of each chunk, and when (monotonic seconds).

    `answer` is the client library's result; None without an end: the client left, or the answer was lost."""

    sent: float
    chunks: list[list[int]] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    answer: Answer | None = None

    def take(self, ids: list[int], now: float) -> None:
        if ids:
            self.chunks.append(ids)
            self.arrivals.append(now)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.chunks))


def judge(heard: Heard, expected: Answer) -> Verdict:
    """Judge an answer: all of it if the request ended, else only that it is a beginning.

    An answer whose ids are right but for one chunk of tokens that had come before is duplicated. Any other difference
    is an alteration."""
    whole = heard.answer is not None
    if heard.answer in (None, expected) and _fits(heard.chunks, expected.ids, whole):
        return "right"
    for place, chunk in enumerate(heard.chunks):
        before, after = heard.chunks[:place], heard.chunks[place + 1 :]
        if _fits(before + after, expected.ids, whole) and _occurs(chunk, _joined(before)):
            return "duplicated"
    return "altered"


def _joined(chunks: Sequence[list[int]]) -> list[int]:
    return [token for chunk in chunks for token in chunk]


def _fits(chunks: Sequence[list[int]], ids: list[int], whole: bool) -> bool:
    """Return whether the chunks are these ids or, if not `whole`, their beginning."""
    joined = _joined(chunks)
    return joined == (ids if whole else ids[: len(joined)])


def _occurs(chunk: list[int], ids: list[int]) -> bool:
    return any(ids[at : at + len(chunk)] == chunk for at in range(len(ids) - len(chunk) + 1))
