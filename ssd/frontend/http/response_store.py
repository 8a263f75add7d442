"""The responses that the frontend keeps for later requests of `/v1/responses`, in its own memory."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Protocol

import msgspec

from ssd.config.engine import Limits
from ssd.frontend.http import answers
from ssd.frontend.http.errors import HttpError, cut
from ssd.frontend.http.exchange import encoder
from ssd.frontend.request import Request

_TURN_BYTES, _ITEM_BYTES = 1024, 256  # of the objects around the texts

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Turn:
    """A response as it is kept: its own input and output as JSON by the ids of items, and the turn `previous` to it.

    A turn lives as long as one after it, also where it has no place in the store any more."""

    __slots__ = ("__weakref__", "_response", "bytes", "input", "output", "previous")

    def __init__(
        self,
        response: answers.Response,
        input: dict[str, bytes],
        output: dict[str, bytes],
        previous: Turn | None,
    ) -> None:
        self._response = encoder.encode(msgspec.structs.replace(response, output=[]))
        self.input, self.output, self.previous = input, output, previous
        items = [*input.values(), *output.values()]
        self.bytes = _TURN_BYTES + sum(map(sys.getsizeof, (self._response, *items))) + _ITEM_BYTES * len(items)

    @property
    def response(self) -> dict[str, msgspec.Raw]:
        """Return the response as a client gets it."""
        return _fields.decode(self._response) | {
            "output": msgspec.Raw(encoder.encode([*map(msgspec.Raw, self.output.values())]))
        }

    def chain(self) -> Iterator[Turn]:
        """Return this turn and those before it, the latest first."""
        turn: Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.previous

    def conversation(self) -> dict[str, bytes]:
        """Return the items of all turns up to this one, in their order."""
        return {name: item for turn in reversed([*self.chain()]) for name, item in (turn.input | turn.output).items()}


class Running(Protocol):
    """A response whose stream has begun. `so_far` is what a client gets of it; `cancel` has it end as cancelled."""

    @property
    def so_far(self) -> answers.Response: ...
    def cancel(self) -> Request: ...


class ResponseStore:
    """Owns the kept responses of each API key: the last `max_stored_responses`, in at most `max_stored_bytes`.

    Where room is needed, the least recently used response goes. `running` has the streams that can be cancelled."""

    def __init__(self, limits: Limits) -> None:
        self.held = 0  # bytes
        self.running: dict[tuple[bytes, str], Running] = {}
        self._most, self._most_bytes = limits.max_stored_responses, limits.max_stored_bytes
        self._turns: dict[tuple[bytes, str], Turn] = {}  # the least recently used first

    @property
    def keeps(self) -> bool:
        """Return True if any response is kept."""
        return self._most > 0 and self._most_bytes > 0

    def add(self, owner: bytes, name: str, turn: Turn) -> bool:
        """Keep a response of an API key; return False if it is too large with the conversation before it."""
        if not self._most or sum(each.bytes for each in turn.chain()) > self._most_bytes:
            return False
        self._turns[owner, name] = turn
        self.held += turn.bytes
        weakref.finalize(turn, self._freed, turn.bytes).atexit = False
        while self._turns and (len(self._turns) > self._most or self.held > self._most_bytes):
            del self._turns[next(iter(self._turns))]
        return (owner, name) in self._turns

    def find(self, owner: bytes, name: str, param: str | None = None) -> Turn:
        """Return a response that is kept, as the most recently used. Raises HttpError."""
        turn = self._turns.pop((owner, name), None)
        if turn is None:
            raise self._unknown("response", name, param)
        self._turns[owner, name] = turn
        return turn

    def item(self, owner: bytes, name: str, param: str) -> bytes:
        """Return an item of a response that is kept, the latest of this id. Raises HttpError."""
        for (whose, _), turn in reversed(self._turns.items()):
            if whose == owner and (found := turn.output.get(name) or turn.input.get(name)) is not None:
                return found
        raise self._unknown("item", name, param)

    def remove(self, owner: bytes, name: str) -> None:
        """Forget a response. Raises HttpError."""
        self.find(owner, name)
        del self._turns[owner, name]

    def _freed(self, size: int) -> None:
        self.held -= size

    def _unknown(self, what: str, name: str, param: str | None) -> HttpError:
        kept = f"the last {self._most} of at most {self._most_bytes >> 20} MiB are" if self.keeps else "none is"
        message = (
            f"there is no {what} {cut(name)!r}. Another API key's is not shown. Responses with store false are not "
            f"kept; of the others {kept}, until the server restarts: send the whole conversation as input"
        )
        return HttpError(404, message, f"{what}_not_found", param)
