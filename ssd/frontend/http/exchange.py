"""One HTTP request and its answer, over ASGI."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeAlias

import msgspec

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON = b"application/json"
_BODY_S = 30.0  # a body that comes more slowly is refused
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")

encoder = msgspec.json.Encoder()


class HttpError(Exception):
    """An answer of another status than 200, in the shape that OpenAI's clients know."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        headers: Mapping[bytes, bytes] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})


class Gone(Exception):
    """The client has left."""


class Exchange:
    """`started` says that the answer's head is out, after which an error can only be part of the answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.started = False
        self._receive, self._send = receive, send
        given = self.header(b"x-request-id")
        self.id = given.decode() if given and _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)

    def header(self, name: bytes) -> bytes | None:
        """The first header of a (lower-case) name."""
        return next((value for key, value in self.scope["headers"] if key == name), None)

    async def body(self, limit: int) -> bytes:
        """The whole body, counted as it comes: at most `limit` bytes. Raises HttpError, or Gone."""
        announced = self.header(b"content-length") or b"0"
        if announced.isdigit() and int(announced) > limit:
            raise _too_large(limit)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(_BODY_S):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise Gone
                    part = message.get("body", b"")
                    size += len(part)
                    if size > limit:
                        raise _too_large(limit)
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise HttpError(408, f"the body did not arrive within {_BODY_S:.0f} s", "request_timeout") from None

    async def disconnected(self) -> None:
        """Return when the client has left; after the body has been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def reply(
        self, body: bytes, status: int = 200, kind: bytes = JSON, headers: Mapping[bytes, bytes] | None = None
    ) -> None:
        """The whole answer at once."""
        await self._head(status, kind, {**(headers or {}), b"content-length": b"%d" % len(body)})
        await self._send({"type": "http.response.body", "body": body})

    async def fail(self, error: HttpError) -> None:
        await self.reply(encoder.encode(error_object(error)), error.status, headers=error.headers)

    async def start_events(self) -> None:
        """Begin a stream of server-sent events."""
        await self._head(200, b"text/event-stream; charset=utf-8", {b"cache-control": b"no-cache"})

    async def write(self, data: bytes, more: bool = True) -> None:
        """Part of a stream; returns when the connection can take more."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _head(self, status: int, kind: bytes, headers: Mapping[bytes, bytes]) -> None:
        self.started = True
        fields = [(b"content-type", kind), (b"x-request-id", self.id.encode()), *headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": fields})


def error_object(error: HttpError) -> dict[str, Any]:
    """The body of an error."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    if error.status == 401:
        kind = "authentication_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"the body is larger than {limit} bytes", "body_too_large", headers={b"connection": b"close"})
