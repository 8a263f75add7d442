"""One HTTP connection: uvicorn's protocol, with bounds on whatever a client may send, leave unsaid or leave unread."""

from __future__ import annotations

import asyncio
import http
from typing import Any, Literal

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ssd.config import Limits
from ssd.frontend.http.errors import HttpError, error_object, refusal
from ssd.frontend.http.exchange import GONE, JSON, encoder, request_id

_HEAD_S = 10.0  # for the first head of a connection, and for any head that has begun
_BODY_S = 30.0
_MOST_PIPELINED = 16
_OTHER_CONNECTIONS = 128  # that are idle, or ask for metrics


class Connection(HttpToolsProtocol):
    """Bounds heads, bodies and what lies between them in time, and all but bodies, whose limit is the route's, in size.
    Lets a client go that takes nothing, and tells the request that is being answered when its client has left, whatever
    else has been asked meanwhile."""

    def __init__(self, *arguments: Any, limits: Limits, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._limits = limits
        self._most = 2 * limits.max_open_requests + _OTHER_CONNECTIONS
        self.headers = []
        self._part: Literal["none", "head", "body"] = "none"
        self._loose = 0  # bytes that have come since the last head, part of a body, or end of a request
        self._answered: RequestResponseCycle | None = None  # the request whose answer comes next, or came last
        self._refused = False
        self._deadline: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._deadline = self.loop.call_later(_HEAD_S, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        if self._reader_timer is not None:
            self._reader_timer.cancel()
        if self._answered is not None and not self._answered.response_complete:
            # uvicorn tells only the newest request, which may be one that waits for this one.
            self._answered.disconnected = True
            if (call := self._answered.scope["state"].get(GONE)) is not None:
                call()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._loose += len(data)
        super().data_received(data)
        if self._loose > self._limits.max_header_bytes:
            self._refuse(_too_large())
        elif self._part != "none" and self._deadline is None and not self._refused:
            self._deadline = self.loop.call_later(_HEAD_S if self._part == "head" else _BODY_S, self._late)

    # -- what the parser finds --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._part = "head"

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._part == "head":  # after a body it is a trailer, which nobody reads
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum([len(name) + len(value) + 4 for name, value in self.headers])
        if len(self.headers) > self._limits.max_header_lines or size > self._limits.max_header_bytes:
            self._refuse(_too_large())
            raise ValueError  # ends the parsing
        if len(self.connections) > self._most:
            self._refuse(refusal("overloaded", f"{self._most} connections are open already"))
            raise ValueError
        self._arrived("body")
        super().on_headers_complete()
        if not self.pipeline:
            self._answered = self.cycle
        self._read_on()

    def on_body(self, body: bytes) -> None:
        self._loose = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._arrived()
        self.headers = []
        self._read_on()

    def send_400_response(self, msg: str) -> None:
        self._refuse(HttpError(400, "this is no valid HTTP request", "invalid_http"))

    def _arrived(self, comes: Literal["none", "body"] = "none") -> None:
        """A head or a body is there, and its deadline is kept."""
        self._part, self._loose = comes, 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _read_on(self) -> None:
        """Even when what is there has to wait: who reads nothing does not see that the client leaves."""
        if len(self.pipeline) <= _MOST_PIPELINED:
            self.flow.resume_reading()

    def _late(self) -> None:
        self._deadline = None
        if self._part == "none":
            self.transport.abort()
        else:
            seconds = _HEAD_S if self._part == "head" else _BODY_S
            message = f"the {self._part} of the request did not arrive within {seconds:g} s"
            self._refuse(HttpError(408, message, "request_timeout"))

    # -- what is sent -----------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answered = self.pipeline[-1][0]
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader_timer = self.loop.call_later(self._limits.slow_reader_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def shutdown(self) -> None:
        """The server ends: what has not arrived whole is refused, unless another answer comes first, which ends it."""
        if self._part != "none" and self._is_next():
            self._refuse(refusal("shutting_down", "the engine is shutting down"))
            return
        super().shutdown()
        if self._part != "none" and self._answered is not None:
            self._answered.keep_alive = False

    def _refuse(self, error: HttpError) -> None:
        """Answer what is being read with an error, unless another answer is on its way; then the end."""
        if self._refused:
            return
        self._refused = True
        if self._is_next():
            body = encoder.encode(error_object(error))
            fields = {
                b"content-type": JSON,
                b"content-length": b"%d" % len(body),
                b"x-request-id": request_id(dict(self.headers)).encode(),
                b"connection": b"close",
                **error.headers,
            }
            head = b"".join([b"%b: %b\r\n" % field for field in fields.items()])
            phrase = http.HTTPStatus(error.status).phrase.encode()
            self.transport.write(b"HTTP/1.1 %d %b\r\n%b\r\n%b" % (error.status, phrase, head, body))
        self.transport.close()

    def _is_next(self) -> bool:
        """Whether what the client gets next is the answer to what it is sending now."""
        before = self._answered
        if self._part == "body":
            return before is self.cycle and not self.cycle.response_started
        return before is None or before.response_complete


def _too_large() -> HttpError:
    return HttpError(431, "the head of this request is larger than this server takes", "headers_too_large")
