"""Whether an answer is the one that the same request got in mode `ar`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Verdict = Literal["right", "duplicated", "altered"]


class Answer(NamedTuple):
    """All that a client gets of a request that ends by itself."""

    ids: list[int]
    text: str
    finish_reason: str


@dataclass(slots=True)
class Heard:
    """What has come for one request so far: the tokens of each chunk, and when it came (monotonic seconds).

    `answer` is what the client library made of it, None where there was no end: the client left, or it was lost.
    """

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
    """Of a request that ended, everything must be as expected; of one whose client left, what came is a beginning.

    An answer that is right but for one chunk too many is duplicated; any other difference is an alteration.
    """
    if _right(heard.chunks, heard.answer, expected):
        return "right"
    for place in range(len(heard.chunks)):
        if _begins(expected.ids, heard.chunks[:place] + heard.chunks[place + 1 :]):
            return "duplicated"
    return "altered"


def _right(chunks: Sequence[list[int]], answer: Answer | None, expected: Answer) -> bool:
    if answer is None:
        return _begins(expected.ids, chunks)
    return answer == expected and [token for chunk in chunks for token in chunk] == expected.ids


def _begins(ids: list[int], chunks: Sequence[list[int]]) -> bool:
    """Whether `ids` begin with these chunks."""
    joined = [token for chunk in chunks for token in chunk]
    return ids[: len(joined)] == joined
