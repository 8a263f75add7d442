"""The responses that the frontend keeps for later requests of `/v1/responses`, in its memory."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from ssd.frontend.http.errors import HttpError, cut
from ssd.frontend.http.exchange import encoder
from ssd.frontend.request import Request
from ssd.plugins.responses import answers

MOST_RESPONSES, MOST_BYTES = 1024, 32 * 2**20  # of each API key, of all keys together
_TURN_BYTES, _ITEM_BYTES = 1024, 256  # of the objects around the texts

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Item(NamedTuple):
    """An item of a conversation: its id, and its JSON as `data`.

    `is_ours`: its id was made here at random, so a request may refer to it."""

    id: str
    data: bytes
    is_ours: bool = True


class Turn:
    """A kept response with its input and output; its `previous` turn lives as long, even when dropped."""

    __slots__ = ("__weakref__", "_response", "bytes", "input", "output", "previous")

    def __init__(
        self,
        response: answers.Response,
        input: Sequence[Item],
        output: Sequence[Item],
        previous: Turn | None,
    ) -> None:
        self._response = encoder.encode(msgspec.structs.replace(response, output=[]))
        self.input, self.output, self.previous = input, output, previous
        items = [item.data for item in (*input, *output)]
        self.bytes = _TURN_BYTES + sum(map(sys.getsizeof, (self._response, *items))) + _ITEM_BYTES * len(items)

    @property
    def response(self) -> dict[str, msgspec.Raw]:
        output = encoder.encode([msgspec.Raw(item.data) for item in self.output])
        return _fields.decode(self._response) | {"output": msgspec.Raw(output)}

    def chain(self) -> Iterator[Turn]:
        turn: Turn | None = self
        while turn is not None:
            yield turn
            turn = turn.previous

    def conversation(self) -> list[Item]:
        return [item for turn in reversed([*self.chain()]) for item in (*turn.input, *turn.output)]


class RunningResponse(Protocol):
    """A response whose stream has begun. `so_far`: what a client gets; `cancel` ends it."""

    @property
    def so_far(self) -> answers.Response: ...
    def cancel(self) -> Request: ...


class ResponseStore:
    """Owns the kept responses of one API key: the last `most`, in at most `most_bytes`.

    The least recently used goes first. `running`: streams that can be cancelled."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self.held = 0  # bytes
        self.running: dict[str, RunningResponse] = {}
        self._most, self._most_bytes = most, most_bytes
        self._turns: dict[str, Turn] = {}  # the least recently used first
        self._of_items: weakref.WeakValueDictionary[str, Turn] = weakref.WeakValueDictionary()  # by ids of ours

    def add(self, name: str, turn: Turn) -> bool:
        """Keep a response; return False if it is too large with the conversation before it."""
        if sum(each.bytes for each in turn.chain()) > self._most_bytes:
            return False
        self._turns[name] = turn
        for item in (*turn.input, *turn.output):
            if item.is_ours:
                self._of_items[item.id] = turn
        self.held += turn.bytes
        weakref.finalize(turn, self._freed, turn.bytes).atexit = False
        while self._turns and (len(self._turns) > self._most or self.held > self._most_bytes):
            del self._turns[next(iter(self._turns))]
        return name in self._turns

    def find(self, name: str, param: str | None = None) -> Turn:
        """Return a response that is kept, as the most recently used. Raises HttpError."""
        turn = self._turns.pop(name, None)
        if turn is None:
            raise self._unknown("response", name, param)
        self._turns[name] = turn
        return turn

    def item(self, name: str, param: str) -> bytes:
        """Return an item, whose id was made here, of a kept response. Raises HttpError."""
        if (turn := self._of_items.get(name)) is None:
            raise self._unknown("item", name, param)
        return next(item.data for item in (*turn.output, *reversed(turn.input)) if item.is_ours and item.id == name)

    def remove(self, name: str) -> None:
        """Forget a response. Raises HttpError."""
        self.find(name)
        del self._turns[name]

    def _freed(self, size: int) -> None:
        self.held -= size

    def _unknown(self, what: str, name: str, param: str | None) -> HttpError:
        message = (
            f"there is no {what} {cut(name)!r}. Another API key's is not shown. Responses with store false are not "
            f"kept; of the others the last {self._most} of at most {self._most_bytes >> 10} KiB are, until the server "
            "restarts: send the whole conversation as input"
        )
        return HttpError(404, message, f"{what}_not_found", param)
