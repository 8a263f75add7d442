"""One HTTP request and its answer, over ASGI."""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Protocol, TypeAlias

import msgspec

from ssd.errors import RequestError
from ssd.frontend.http.errors import Headers, HttpError, error_object
from ssd.frontend.memory_budget import MemoryBudget
from ssd.ipc.listening import is_loopback

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"
GONE = "gone"  # key in a request's state: the callback for a client that leaves before its answer
_UNCOUNTED = 16 * 2**10  # bytes
_PART = 2**20  # bytes of an answer that are copied for a slow client at a time
_TRACE = (b"traceparent", b"tracestate")
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
# Unique names for requests without one; cheaper than a random one each.
_PROCESS, _numbers = secrets.token_hex(8), itertools.count()

encoder = msgspec.json.Encoder()


class Gone(Exception):
    """The client has left."""


class Account(Protocol):
    """The use that one API key makes of its quota."""

    def begin(self) -> Headers:
        """Count a request, and return headers of its answer. Raises HttpError 429 for one too many."""

    def reserve(self, tokens: int, first: bool) -> None:
        """Take tokens that a request may need. Raises HttpError 429 if none is left for its `first` ones."""

    def end(self, reserved: int, used: int) -> None:
        """Give back the reserved tokens that a request did not use."""


class Accounts(Protocol):
    def of(self, key: bytes) -> Account: ...


class Exchange:
    """A request and its reply; if `started`, the head of the answer is out: an error can only be part of the answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.started = False
        self.more_headers: Headers = {}  # every answer has these, errors too
        self.error_object: Callable[..., Any] = error_object  # of an error and `id`, in the shape of the door
        self.path: Mapping[str, str] = {}  # the values of the names in the route's path
        self._receive, self._send = receive, send
        self._headers = dict(scope["headers"])
        self.id = request_id(self._headers)
        self.key = b""  # the API key that it came with
        self.account: Account | None = None  # of that key, if there are quotas
        self._budget: MemoryBudget | None = None
        self._size = self._held = self._reserved = 0

    def header(self, name: bytes) -> bytes | None:
        return self._headers.get(name)

    def is_local_program(self) -> bool:
        """Return True for a program on this machine that is no browser: pages may send forms to any server.

        Whoever reaches a Unix socket is on this machine; ASGI gives its path without a port."""
        of_browser = self.header(b"origin") is not None or self.header(b"sec-fetch-site") is not None
        client, server = self.scope.get("client"), self.scope.get("server")
        of_socket = server is not None and server[1] is None
        return not of_browser and (of_socket or (client is not None and is_loopback(client[0])))

    @property
    def trace(self) -> dict[str, str]:
        return {name.decode(): value.decode("latin-1") for name in _TRACE if (value := self.header(name)) is not None}

    async def body(self, limit: int, budget: MemoryBudget) -> bytes:
        """Return the whole body, of at most `limit` bytes, which count in `budget` until `end`.

        Raises HttpError, RequestError or Gone."""
        self._budget = budget
        announced = self.header(b"content-length") or b"0"
        length = int(announced) if announced.isdigit() else 0
        if length > limit:
            raise _too_large(limit)
        self.hold(length)
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Gone
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            self.hold(size)
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    def hold(self, size: int) -> None:
        """Count `size` bytes in all for this request. Raises RequestError where the budget is used up.

        The first KiB are free, so that nobody's short prompt waits for others' long ones."""
        self._size = max(self._size, size)
        more = size - _UNCOUNTED - self._held
        if self._budget is not None and more > 0:
            self._budget.grow(self, more)
            self._held += more

    def hold_more(self, size: int) -> None:
        self.hold(self._size + size)

    def end(self) -> None:
        if self._budget is not None:
            self._budget.give_back(self, self._held)

    def when_gone(self, call: Callable[[], object] | None) -> None:
        """Call `call` if the client leaves before it has its answer, once the body was read; None ends that."""
        self.scope["state"][GONE] = call

    def begin_use(self) -> None:
        """Count a generating request in its key's account. Raises HttpError 429 for one too many."""
        if self.account is not None:
            self.more_headers = {**self.more_headers, **self.account.begin()}

    def reserve(self, tokens: int) -> None:
        """Take the tokens that an admitted prompt may need. Raises RequestError if the account has none left."""
        if self.account is not None:
            try:
                self.account.reserve(tokens, first=not self._reserved)
            except HttpError as error:
                self.more_headers = {**self.more_headers, **error.headers}
                raise RequestError(error.code, error.message) from None
            self._reserved += tokens

    def end_use(self, tokens: Callable[[], int]) -> None:
        """Give back the reserved tokens that a request, counted by `begin_use`, did not use."""
        if self.account is not None:
            self.account.end(self._reserved, tokens())

    async def reply(self, body: bytes, status: int = 200, kind: bytes = JSON, headers: Headers | None = None) -> None:
        await self._head(status, kind, {**(headers or {}), b"content-length": b"%d" % len(body)})
        for start in range(0, len(body) or 1, _PART):
            part = body[start : start + _PART]
            await self._send({"type": "http.response.body", "body": part, "more_body": start + _PART < len(body)})

    async def reply_json(self, answer: Any) -> None:
        await self.reply(encoder.encode(answer))

    async def fail(self, error: HttpError) -> None:
        body = self.error_object(error, self.id)
        await self.reply(encoder.encode(body), error.status, headers=error.headers)

    async def start_stream(self, kind: bytes) -> None:
        await self._head(200, kind, {b"cache-control": b"no-cache"})

    async def write(self, data: bytes, more: bool = True) -> None:
        """Send part of a stream, and return when the connection can take more."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _head(self, status: int, kind: bytes, headers: Headers) -> None:
        self.started = True
        more = {**headers, **self.more_headers}
        fields = [(b"content-type", kind), (b"x-request-id", self.id.encode()), *more.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": fields})


def request_id(headers: Headers) -> str:
    given = headers.get(b"x-request-id")
    return given.decode() if given and _REQUEST_ID.fullmatch(given) else f"{_PROCESS}{next(_numbers):016x}"


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"the body is larger than {limit} bytes", "body_too_large", headers={b"connection": b"close"})
