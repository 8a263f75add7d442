"""The receiver's state of one request, which selects useful speculations. Pure: no socket, no board of its own.

A speculation may arrive late, so it is kept as a *path*: tokens that follow a place of the text. The longest path that
the draft believes in is *expected*."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ssd.config.params import MAX_CHAINS, MAX_LOOKAHEAD
from ssd.ipc.board import TRUNK, Key, Place, Prepared
from ssd.ipc.messages import Admit, Launch, Verified
from ssd.plugins.remote.link import Entry, Trunk
from ssd.speculation.acceptance import common_prefix_length

_MOST_PATHS = 256
_MOST_ROUNDS = 64  # remembered rounds: a message about an older one is of no use
_ALONE = Place(1, 1)
_TRUNK = -1, -1  # the key of the path that is the draft's trunk


class Begun(NamedTuple):
    """A verification that began at length `base`; the draft expected the tokens `trunk` from there."""

    base: int
    trunk: list[int]


@dataclass
class ReceivedPath:
    """Tokens `ids` that follow the first `start` tokens of the text.

    At place `fork` they leave the draft's trunk, for an alternative unless the draft is `sure`."""

    start: int
    fork: int
    sure: bool
    ids: list[int]
    place: Place


class ReceivedRequest:
    """One request as the target and its draft see it.

    `text`: committed tokens; `flight`: draft tokens that are verified now, None while the target waits for a backup's.
    `expected`: the likeliest next tokens, which begin with those in flight. `shown`: entries on the board, by outcome;
    during a round they only grow, because the target may have read them."""

    def __init__(self, admit: Admit, epoch: int) -> None:
        self.slot, self.round, self._named = admit.slot, admit.round, (epoch, admit.request)
        self.text = list(admit.token_ids)
        self.flight: list[int] | None = []
        self.expected: list[int] = []
        self.shown: dict[tuple[int, int, int], Prepared] = {}
        self._paths: dict[tuple[int, int], ReceivedPath] = {}  # by fork and the token there
        self._rounds = {self.round: Begun(len(self.text), [])}
        self._answer: tuple[int, int, int, int] | None = None

    # -- the target's messages --------------------------------------------------------------------------------------

    def outcome(self, row: Verified) -> bool:
        """Note an outcome and forget the shown entries; return False if it contradicts the known state."""
        flight = self.flight
        if flight is None or row.round != self.round or row.accepted > len(flight):
            return False
        taken = self.shown.get((row.round, row.accepted, row.token))
        if row.in_flight and (taken is None or row.in_flight > len(taken.ids)):
            return False
        self._answer = (row.round, len(self.text), row.accepted, row.token)
        new = [*flight[: row.accepted], row.token]
        self.text += new
        self.expected = self.expected[len(new) :] if self.expected[: len(new)] == new else []
        self.round, self.shown = row.round + 1, {}
        self._rounds[self.round] = Begun(len(self.text), [])
        self._rounds.pop(self.round - _MOST_ROUNDS, None)
        if row.in_flight is None:
            self.flight = None
        else:
            self.flight = list(taken.ids[: row.in_flight]) if taken is not None else []
        return True

    def launched(self, row: Launch) -> bool:
        """Note the tokens that the target verifies after a wait; return False if they do not follow."""
        if self.flight is not None or row.round != self.round or self._answer is None:
            return False
        answer = self.shown.get((self._answer[0], *self._answer[2:]))
        ids = row.tokens or ([] if answer is None else answer.ids)
        if row.in_flight > len(ids):
            return False
        self.flight = list(ids[: row.in_flight])
        return True

    # -- the draft's messages ---------------------------------------------------------------------------------------

    def expects(self, trunk: Trunk) -> list[Prepared] | None:
        """Note the draft's trunk and return the entries to show for it; None if it is of no use."""
        begun = self._rounds.get(trunk.round)
        if begun is None or trunk.base != begun.base:
            return None
        self._rounds[trunk.round] = begun._replace(trunk=trunk.ids)
        path = ReceivedPath(begun.base, begun.base, True, trunk.ids, _ALONE)
        if not self._holds(path):
            return []
        self._paths[_TRUNK] = path
        return self._shows([], self._expect([path]))

    def heard(self, entry: Entry) -> list[Prepared] | None:
        """Note an entry of the draft; return the entries to show for it, None if it is of no use."""
        begun, accepted = self._rounds.get(entry.round), entry.accepted
        if begun is None or entry.base != begun.base or accepted > len(begun.trunk):
            return None
        fork, place = begun.base + accepted, Place(entry.rank, entry.fan_out)
        ids = [*begun.trunk[:accepted], entry.token, *entry.ids]
        before = self._paths.pop((fork, entry.token), None)
        if before is not None and before.start == begun.base and before.ids[: len(ids)] == ids:
            ids = before.ids
        path = ReceivedPath(begun.base, fork, accepted == len(begun.trunk) and entry.rank <= 1, ids, place)
        if not self._holds(path):
            return []
        self._paths[fork, entry.token] = path
        if len(self._paths) > _MOST_PATHS:
            del self._paths[next(iter(self._paths))]
        more = self._expect([path])
        return self._shows([path], more)

    def useful(self) -> list[Prepared]:
        """Drop the paths that disagree with the text, and return the entries to show for all others.

        Call it after the text or the flight has changed."""
        self._paths = {key: path for key, path in self._paths.items() if self._holds(path)}
        self._expect(self._paths.values())
        return self._shows(self._paths.values(), True)

    def _holds(self, path: ReceivedPath) -> bool:
        since = len(self.text) - path.start
        return len(path.ids) > since and path.ids[:since] == self.text[path.start :]

    def _expect(self, paths: Iterable[ReceivedPath]) -> bool:
        """Extend the expected tokens by the flight and by paths, and return True if they have changed.

        A path counts if its fork lies before the end of the flight, or if it is `sure`."""
        flight, before = self.flight or [], self.expected
        if self.expected[: len(flight)] != flight:
            self.expected = list(flight)
        settled = len(self.text) + len(flight)
        for path in paths:
            if path.sure or path.fork < settled:
                rest = path.ids[len(self.text) - path.start :]
                if len(rest) > len(self.expected) and rest[: len(self.expected)] == self.expected:
                    self.expected = rest
        return self.expected is not before

    def _shows(self, paths: Iterable[ReceivedPath], expected: bool) -> list[Prepared]:
        """Return the entries to show for paths, and with `expected` for the expected tokens."""
        if self.flight is None:
            waits = expected and self._answer is not None and self.expected
            found = [self._show(TRUNK, *self._answer, _ALONE, self.expected)] if waits and self._answer else []
        else:
            settled, length = len(self.text) + len(self.flight), len(self.text)
            found = [self._answering(p.ids[length - p.start :], p) for p in paths if p.fork <= settled]
            found += [self._answering(self.expected, None)] if expected else []
        return [shown for shown in found if shown is not None]

    def _answering(self, rest: list[int], path: ReceivedPath | None) -> Prepared | None:
        """Return the entry for the outcome that comes if the tokens `rest` follow the text; None if not new.

        Example: flight 5 6 and `rest` 5 7 8 9: one token is accepted, then comes 7; the entry has the ids 8 9."""
        assert self.flight is not None
        accepted = common_prefix_length(rest, self.flight)
        if accepted == len(rest):
            return None
        place = path.place if path is not None and path.fork == len(self.text) + accepted else _ALONE
        where = self.round, len(self.text), accepted, rest[accepted]
        return self._show(len(self.shown), *where, place, rest[accepted + 1 :])

    def _show(
        self, entry: int, round: int, base: int, accepted: int, token: int, place: Place, ids: list[int]
    ) -> Prepared | None:
        before, ids = self.shown.get((round, accepted, token)), ids[:MAX_LOOKAHEAD]
        if before is not None:
            if len(ids) <= len(before.ids) or ids[: len(before.ids)] != before.ids:
                return None
            entry, place = before.entry, before.place
        elif entry >= MAX_CHAINS and self.flight is not None:  # the last entry is for answers to a target that waits
            return None
        key = Key(*self._named, round, base, accepted, token)
        shown = self.shown[round, accepted, token] = Prepared(entry, key, ids, place)
        return shown
