"""What the receiver knows of one request, and which speculations are of use to it now. Pure: no socket, no board.

A speculation that arrives is about a verification that may be over. It is kept as a *path*: tokens that follow a place
of the text. A path that agrees with the tokens that came since says what comes next, however late it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ssd.config.params import MAX_CHAINS, MAX_LOOKAHEAD
from ssd.ipc.board import TRUNK, Place
from ssd.ipc.link import Entry
from ssd.ipc.messages import Admit, Launch, Verified

_MOST_PATHS = 64
_MOST_ROUNDS = 64  # that are remembered: what is about an older one is of no use
_ALONE = Place(1, 1)


class Shown(NamedTuple):
    """An entry for the board: it answers the outcome (`accepted`, `token`) of `round`, begun at length `base`."""

    entry: int
    round: int
    base: int
    accepted: int
    token: int
    place: Place
    ids: list[int]


class Round(NamedTuple):
    """A verification that is over: it began at length `base` and accepted `accepted` draft tokens."""

    base: int
    accepted: int


@dataclass
class Path:
    """`ids` follow the first `start` tokens of the text, if round `round` accepts at least `accepted` tokens."""

    round: int
    accepted: int
    start: int
    ids: list[int]
    place: Place


def agreed(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns how many leading tokens two texts share."""
    for index, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return index
    return min(len(one), len(other))


class Request:
    """One request as the target and its draft see it.

    `text` are the committed tokens; `flight` the draft tokens that are verified now, None while the target waits for
    those of a backup. `shown` is on the board, by what it answers. What is shown is never taken back or changed, only
    made longer: the target may have read it."""

    def __init__(self, admit: Admit) -> None:
        self.slot, self.round = admit.slot, admit.round
        self.text = list(admit.token_ids)
        self.flight: list[int] | None = []
        self.shown: dict[tuple[int, int, int], Shown] = {}
        self._paths: dict[tuple[int, int, int], Path] = {}
        self._rounds: dict[int, Round] = {}
        self._answer: tuple[int, int, int, int] | None = None

    def outcome(self, row: Verified) -> bool:
        """Note an outcome; what was shown is out of date. Returns False if it does not follow from what is known."""
        flight = self.flight
        if flight is None or row.round != self.round or row.accepted > len(flight):
            return False
        taken = self.shown.get((row.round, row.accepted, row.token))
        if row.in_flight > 0 and (taken is None or row.in_flight > len(taken.ids)):
            return False
        base = len(self.text)
        self._rounds[row.round] = Round(base, row.accepted)
        self._rounds.pop(row.round - _MOST_ROUNDS, None)
        self.text += [*flight[: row.accepted], row.token]
        self.round, self.shown = row.round + 1, {}
        self._answer = (row.round, base, row.accepted, row.token)
        self.flight = None if row.in_flight < 0 else list(taken.ids[: row.in_flight]) if taken is not None else []
        return True

    def launched(self, row: Launch) -> bool:
        """Note what the target verifies after it has waited. Returns False if that does not follow."""
        if self.flight is not None or row.round != self.round or self._answer is None:
            return False
        answer = self.shown.get((self._answer[0], *self._answer[2:]))
        ids = row.tokens or ([] if answer is None else answer.ids)
        if row.in_flight > len(ids):
            return False
        self.flight = list(ids[: row.in_flight])
        return True

    def take(self, entry: Entry) -> Path | None:
        """Returns the path that an entry of the draft stands for; None if it is of no use."""
        accepted, over = entry.accepted, self._rounds.get(entry.round)
        if entry.round == self.round:
            if self.flight is None or entry.base != len(self.text) or accepted > len(self.flight):
                return None
        elif over is None or entry.base != over.base or accepted > over.accepted:
            return None
        place = Place(entry.rank, entry.fan_out)
        path = Path(entry.round, accepted, entry.base + accepted, [entry.token, *entry.ids], place)
        key = entry.round, accepted, entry.token
        self._paths.pop(key, None)
        self._paths[key] = path
        if len(self._paths) > _MOST_PATHS:
            del self._paths[next(iter(self._paths))]
        return path

    def useful(self) -> list[Shown]:
        """Returns what all paths say after the text or the flight has changed. Those that went wrong are dropped."""
        found = []
        for key, path in list(self._paths.items()):
            if not self._holds(path):
                del self._paths[key]
            elif (shown := self.says(path)) is not None:
                found.append(shown)
        return found

    def says(self, path: Path) -> Shown | None:
        """Returns what a path brings to the board; None if that is nothing new."""
        ahead = path.start - len(self.text)
        if self.flight is None:
            if ahead > 0 or not self._follows(path) or self._answer is None:
                return None
            return self._show(TRUNK, *self._answer, _ALONE, path.ids[-ahead:])
        if not self._follows(path):
            return None
        rest = self.flight[: max(0, ahead)] + path.ids[max(0, -ahead) :]
        accepted = agreed(rest, self.flight)
        if accepted == len(rest):
            return None
        place = path.place if (path.round, path.accepted) == (self.round, accepted) else _ALONE
        where = self.round, len(self.text), accepted, rest[accepted]
        return self._show(len(self.shown), *where, place, rest[accepted + 1 :])

    def _holds(self, path: Path) -> bool:
        """True if the text may still go on as a path says."""
        over = self._rounds.get(path.round)
        known = path.round == self.round or (over is not None and path.accepted <= over.accepted)
        return known and self._follows(path) and path.start + len(path.ids) > len(self.text)

    def _follows(self, path: Path) -> bool:
        """True if the text says nothing else than the path."""
        since = self.text[path.start :]
        return since == path.ids[: len(since)]

    def _show(
        self, entry: int, round: int, base: int, accepted: int, token: int, place: Place, ids: list[int]
    ) -> Shown | None:
        before, ids = self.shown.get((round, accepted, token)), ids[:MAX_LOOKAHEAD]
        if before is not None:
            if len(ids) <= len(before.ids) or ids[: len(before.ids)] != before.ids:
                return None
            entry, place = before.entry, before.place
        elif entry >= MAX_CHAINS and self.flight is not None:  # the last entry is for answers to a target that waits
            return None
        shown = self.shown[round, accepted, token] = Shown(entry, round, base, accepted, token, place, ids)
        return shown
