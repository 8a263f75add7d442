"""The connected drafts, and the draft of each request. Pure: no socket, no board of its own."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from ssd.ipc.messages import Admit, Launched, Outcomes, Rehearse, Release, Retune
from ssd.ipc.public import Message
from ssd.plugins.remote.receiver.requests import Requests

MOST_SESSIONS = 64
DRAFT_RATE = 2000.0
"""Frames of one draft that are examined in a second."""


@dataclass
class Allowance:
    """A rate limit (token bucket): `rate` uses a second, and as many at once after a pause."""

    rate: float
    left: float = 0.0
    at: float = 0.0

    def taken(self) -> bool:
        now = time.monotonic()
        self.left, self.at = min(self.rate, self.left + self.rate * (now - self.at)), now
        if self.left < 1:
            return False
        self.left -= 1
        return True


@dataclass
class Session:
    """A connected draft: `peer` on the socket, `key` ("" without keys), `client` that owns it.

    `joined`: the target knows of it. `rtt`: mean round trip in seconds, `jitter`: its mean deviation."""

    peer: bytes
    key: str
    name: str
    number: int
    requests: Requests
    client: str = ""
    joined: bool = False
    rtt: float = 0.0
    jitter: float = 0.0
    heard_ns: int = 0
    unclaimed_ns: int = 0
    allowance: Allowance = field(default_factory=lambda: Allowance(DRAFT_RATE))

    def worked(self, nanoseconds: int, now_ns: int) -> int:
        """Return the `nanoseconds` that a draft claims, at most those that have passed unclaimed."""
        if self.heard_ns:
            self.unclaimed_ns += now_ns - self.heard_ns
        found = min(nanoseconds, self.unclaimed_ns)
        self.heard_ns, self.unclaimed_ns = now_ns, self.unclaimed_ns - found
        return found

    def measured(self, seconds: float) -> None:
        """Note a round trip: means of it and of its deviation, as TCP keeps them (RFC 6298)."""
        if self.rtt == 0:
            self.rtt, self.jitter = seconds, seconds / 2
        else:
            self.jitter += (abs(seconds - self.rtt) - self.jitter) / 4
            self.rtt += (seconds - self.rtt) / 8


class Sessions:
    """All sessions by their peers, and the session of each request.

    A request belongs to a draft of its client, else, unless `own`, to the draft with the fewest requests."""

    def __init__(self, own: bool) -> None:
        self._own = own
        self._by_peer: dict[bytes, Session] = {}
        self._homes: dict[int, Session] = {}

    def __len__(self) -> int:
        return len(self._by_peer)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_peer.values()))

    @property
    def joined(self) -> list[Session]:
        return [session for session in self if session.joined]

    @property
    def readers(self) -> list[str] | None:
        """Return the names of the clients whose requests may be read; None: all."""
        return sorted({session.client for session in self.joined} - {""}) if self._own else None

    def of(self, peer: bytes) -> Session | None:
        return self._by_peer.get(peer)

    def rival(self, peer: bytes, key: str) -> Session | None:
        """Return the session that an offer of a peer with a `key` replaces."""
        same = (session for session in self if session.peer == peer or (key and session.key == key))
        return next(same, None)

    def add(self, session: Session) -> None:
        self._by_peer[session.peer] = session

    def remove(self, session: Session) -> list[int]:
        del self._by_peer[session.peer]
        lost = [request for request, home in self._homes.items() if home is session]
        for request in lost:
            del self._homes[request]
        return lost

    def clear(self) -> None:
        self._homes.clear()

    def routed(self, message: Message) -> list[tuple[Session, Message]]:
        """Return the parts of a message of the target, each with the session whose draft gets it."""
        if isinstance(message, Admit):
            return self._admitted(message)
        if isinstance(message, Outcomes | Launched):
            return self._rows(message.rows, lambda row: row.request, type(message))
        if isinstance(message, Retune):
            return self._rows(message.rows, lambda row: row[0], Retune)
        if isinstance(message, Release):
            found = self._rows(message.requests, lambda request: request, Release)
            for request in message.requests:
                self._homes.pop(request, None)
            return found
        if isinstance(message, Rehearse):
            return [(session, message) for session in self.joined[:1]]
        return [(session, message) for session in self.joined]

    def _admitted(self, admit: Admit) -> list[tuple[Session, Message]]:
        found: list[tuple[Session, Message]] = []
        before, home = self._homes.pop(admit.request, None), self._home(admit.owner)
        if before is not None and before is not home:
            found.append((before, Release([admit.request])))
        if home is not None:
            self._homes[admit.request] = home
            found.append((home, replace(admit, owner="")))
        return found

    def _home(self, owner: str) -> Session | None:
        mine = [session for session in self.joined if owner and session.client == owner]
        able = mine or ([] if self._own else self.joined)
        loads = Counter(session.number for session in self._homes.values())
        return min(able, key=lambda session: loads[session.number], default=None)

    def _rows(
        self, rows: list[Any], request_of: Callable[[Any], int], make: Callable[[list[Any]], Message]
    ) -> list[tuple[Session, Message]]:
        parts: dict[bytes, list[Any]] = {}
        for row in rows:
            home = self._homes.get(request_of(row))
            if home is not None:
                parts.setdefault(home.peer, []).append(row)
        return [(self._by_peer[peer], make(part)) for peer, part in parts.items()]
