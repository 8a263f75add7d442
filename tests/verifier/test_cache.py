"""What is said of the speculation cache: a hit, or why it was none."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest

from ssd.config.params import Speculation
from ssd.execution.pages import PagePool, PageTable
from ssd.ipc.board import BoardReader, BoardWriter, Key, size_bytes
from ssd.ipc.process import memory_file
from ssd.speculation.acceptance import Outcome
from ssd.verifier.board_proposer import BoardProposer
from ssd.verifier.proposer import Result
from ssd.verifier.sequence import Sequence
from tests.boards import prepared
from tests.verifier.scripted import VOCAB, submit

PROMPT, ROUND, TOKEN = [1, 2, 3], 4, 9
ASKED = Speculation("ssd", 2, (2,), "none")
Entry = tuple[int, int, list[int]]
"""(accepted, bonus token, ids)"""


@dataclass
class Round:
    """One sequence at the end of a round that accepted one of two draft tokens, and a board that the test writes."""

    speculation: Speculation = ASKED
    max_tokens: int = 40
    hears: bool = True

    def cache(self, entries: list[Entry], *, round: int = ROUND, written_for: int | None = None) -> str:
        """What the cache had for the outcome of `round`."""
        descriptor = memory_file("board", size_bytes(2))
        writer, reader = BoardWriter(descriptor, 2), BoardReader(descriptor, 2, VOCAB)
        os.close(descriptor)
        proposer = BoardProposer(reader, lambda message: self.hears)
        asked = submit(7, PROMPT, speculation=self.speculation, max_tokens=self.max_tokens)
        sequence = Sequence(asked, self.speculation, 100, PageTable(PagePool(4, 4)), 0.0)
        sequence.slot = 1
        proposer.session.join(1)
        proposer.admit(sequence)
        of = round if written_for is None else written_for
        keys = [Key(1, 7, of, len(PROMPT), accepted, token) for accepted, token, _ in entries]
        if entries:
            writer.publish(1, prepared(range(len(entries)), keys, [ids for _, _, ids in entries]))
        sequence.tokens += [4, TOKEN]
        sequence.round = round + 1
        proposer.outcomes([Result(sequence, round, len(PROMPT), 2, Outcome(1, TOKEN), "")])
        assert sequence.cache != "hit" or sequence.proposal
        return sequence.cache


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([(0, 5, [1]), (1, TOKEN, [6, 7])], "hit"),
        ([(1, TOKEN, [])], "late"),
        ([], "late"),
        ([(0, TOKEN, [6]), (1, 8, [6])], "token_not_covered"),
        ([(0, TOKEN, [6]), (2, TOKEN, [6])], "k_not_covered"),
    ],
)
def test_what_the_board_held(entries: list[Entry], expected: str) -> None:
    assert Round().cache(entries) == expected


def test_what_answers_another_round_is_nothing() -> None:
    assert Round().cache([(1, TOKEN, [6]), (1, 8, [6])], written_for=ROUND - 1) == "late"


def test_the_first_round_is_apart() -> None:
    """A miss has its name, and what was there counts neither way."""
    assert Round().cache([(1, 8, [6])], round=0) == "first_round"
    assert Round().cache([(1, TOKEN, [6])], round=0) == ""


def test_a_draft_that_is_known_to_be_lost() -> None:
    """What it left on the board is not looked at."""
    assert Round(hears=False).cache([]) == "draft_down"
    assert Round(hears=False).cache([(1, TOKEN, [6])]) == "draft_down"


@pytest.mark.parametrize(
    "changes",
    [{"speculation": Speculation("sd", 2, (3,), "jit")}, {"speculation": Speculation("ar")}, {"max_tokens": 3}],
    ids=str,
)
def test_where_nothing_is_looked_up_nothing_is_said(changes: dict[str, Any]) -> None:
    """Without a cache, and where the next token is the last: there is nothing to draft."""
    assert Round(**changes).cache([(1, TOKEN, [6])]) == ""
