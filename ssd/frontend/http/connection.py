"""One HTTP connection: uvicorn's protocol, with bounds on all that a client sends and leaves unread.

uvicorn bounds neither heads nor the time that a head or a body takes, nor how long an answer may stay unread. It
answers invalid requests in plain text, loses the body behind an offer of HTTP/2, resets a client that still sends a
refused body, and takes one that has closed its sending side for one that has left."""

from __future__ import annotations

import asyncio
import contextlib
import http
import select
from collections.abc import Callable
from typing import Any, Literal

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ssd.frontend.http.errors import Headers, HttpError, error_object, refusal
from ssd.frontend.http.exchange import GONE, JSON, encoder, request_id

_HEAD_S = 10.0  # for the first head of a connection, and for any head that has begun
_BODY_S = 30.0  # for a body, and for what a client sends after its last answer
_REST_BYTES = 256 * 2**20  # of a body that are read and dropped after the last answer
_MOST_PIPELINED = 16
MAX_HEADER_BYTES, MAX_HEADER_LINES = 64 * 2**10, 100  # of a request's address and headers, together
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Hangups:
    """A watch on clients that have stopped sending, whose sockets an event loop no longer reads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._epoll = select.epoll()
        self._calls: dict[int, Callable[[], None]] = {}
        loop.add_reader(self._epoll.fileno(), self._tell)

    def watch(self, descriptor: int, call: Callable[[], None]) -> None:
        """Call `call` once the peer resets or closes the connection; call `forget` before the socket closes."""
        self._calls[descriptor] = call
        self._epoll.register(descriptor, select.EPOLLONESHOT)  # reports errors and hang-ups, and nothing else

    def forget(self, descriptor: int) -> None:
        if self._calls.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)

    def _tell(self) -> None:
        for descriptor, _ in self._epoll.poll(0):
            self._calls[descriptor]()


class Arrival:
    """The part of a request that a client is sending, and its deadline.

    "rest" comes after an error or the last answer, and is dropped. `loose` counts bytes since the last head, part of a
    body, or end of a request."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.part: Literal["none", "head", "body", "rest"] = "none"
        self.loose = 0
        self._loop = loop
        self._deadline: asyncio.TimerHandle | None = None

    def expect(self, part: Literal["none", "body", "rest"]) -> None:
        self.part, self.loose = part, 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def hurry(self, seconds: float, late: Callable[[], None]) -> None:
        """Call `late` if the part has not arrived after `seconds`. An earlier deadline stays."""
        if self._deadline is None:
            self._deadline = self._loop.call_later(seconds, late)


class HttpConnection(HttpToolsProtocol):
    """One connection, with heads, bodies and pauses bounded in time, and heads in size; the route bounds bodies.

    The request being answered is told when its client has left. To its answers a connection is the transport, whose
    `close` lets the client read them first."""

    def __init__(self, *arguments: Any, patience_s: float, hangups: Hangups, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._patience_s, self._hangups = patience_s, hangups
        self.ended = asyncio.Event()
        self.headers = []
        self._arrival = Arrival(self.loop)
        self._answered: RequestResponseCycle | None = None  # the request whose answer comes next, or came last
        self._refusal = b""  # the last answer, which waits for those before it
        self._lingers = False  # everything is sent, and the client may read it
        self._reader_timer: asyncio.TimerHandle | None = None
        self._descriptor = -1

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._descriptor = transport.get_extra_info("socket").fileno()
        self.write = transport.write
        self._arrival.hurry(_HEAD_S, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrival.expect("none")
        self._hangups.forget(self._descriptor)
        if self._reader_timer is not None:
            self._reader_timer.cancel()
        if self._answered is not None and not self._answered.response_complete:
            # uvicorn tells only the newest request, which may be one that waits for this one.
            self._answered.disconnected = True
            if (call := self._answered.scope["state"].get(GONE)) is not None:
                call()
        if self.cycle is not None:
            self.cycle.transport = self.transport  # breaks a reference cycle
        super().connection_lost(exc)
        self.ended.set()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._arrival.loose += len(data)
        if self._arrival.part != "rest":
            try:
                self._feed(data)
            except httptools.HttpParserError:
                self._refuse(HttpError(400, "this is no valid HTTP request", "invalid_http"))
            if self._arrival.part != "rest" and self._arrival.loose > MAX_HEADER_BYTES:
                self._refuse(_too_large())
            self._hurry()
        elif self._arrival.loose > _REST_BYTES and self._is_answering:
            self.flow.pause_reading()
        elif self._arrival.loose > _REST_BYTES:
            self.transport.abort()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep a client that sends no more until it has the answers that are due.

        One that has left resets the connection at the next thing sent. So an interim answer is sent, which every other
        client of HTTP/1.1 ignores."""
        if self._arrival.part in ("head", "body"):
            self._refuse(HttpError(400, "the connection ended in the middle of a request", "invalid_http"))
        self._arrival.expect("none")
        with_tls = self.transport.get_extra_info("ssl_object") is not None  # which has no half-closed connections
        if self._answered is None or not self._is_answering or self.is_closing() or with_tls:
            return False  # closes the connection
        if not self._refusal:
            self.cycle.keep_alive = False
        self._hangups.watch(self._descriptor, self.transport.abort)
        if not self._answered.response_started and self._answered.scope["http_version"] == "1.1":
            self.transport.write(_CONTINUE)
        return True

    # -- what the parser finds --------------------------------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as offer:
                # The parser takes an offer of another protocol for the end of HTTP. We decline: the parser gets the
                # same head without the offer, then what follows, which may be a body.
                rest = rest[offer.args[0] :]
                fields = [b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade"]
                method, version = self.parser.get_method(), self.parser.get_http_version().encode()
                self.parser = httptools.HttpRequestParser(self)
                self.parser.feed_data(b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(fields)))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._arrival.part = "head"

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._arrival.part == "head":  # after a body it is a trailer, and dropped
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if (error := _wrong_head(self.url, self.headers, self.parser)) is not None:
            self._refuse(error)
            raise ValueError  # ends the parsing
        if self.parser.should_upgrade():
            return  # the same head comes again (`_feed`)
        self._arrival.expect("body")
        super().on_headers_complete()
        self.cycle.transport = self  # type: ignore[assignment]  # as far as an answer needs one
        if not self.pipeline:
            self._answered = self.cycle
        self._read_on()

    def on_body(self, body: bytes) -> None:
        self._arrival.loose = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._arrival.expect("none")
        self.headers = []
        self._read_on()

    def _read_on(self) -> None:
        # Even when the next request has to wait: otherwise a client's leaving would not be seen.
        if len(self.pipeline) <= _MOST_PIPELINED:
            self.flow.resume_reading()

    def _hurry(self) -> None:
        # Behind an answer no body is read.
        if self._arrival.part in ("head", "body") and not self._is_answering:
            self._arrival.hurry(_HEAD_S if self._arrival.part == "head" else _BODY_S, self._late)

    def _late(self) -> None:
        part = self._arrival.part
        if part == "none":
            self.transport.abort()
        else:
            message = f"the {part} of the request did not arrive within {_HEAD_S if part == 'head' else _BODY_S:g} s"
            self._refuse(HttpError(408, message, "request_timeout"))

    # -- what is sent -----------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        if self.is_closing():
            return
        if self.pipeline:
            self._answered = self.pipeline[-1][0]
        super().on_response_complete()
        self._end_if_refused()
        self._hurry()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader_timer = self.loop.call_later(self._patience_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def shutdown(self) -> None:
        """End the connection after the answers that are due, and refuse a request that has not arrived whole."""
        if self._arrival.part in ("head", "body"):
            self._refuse(refusal("shutting_down", "the engine is shutting down"))
        elif not self._is_answering:
            self.transport.close()
        elif not self._refusal:
            self.cycle.keep_alive = False

    def _refuse(self, error: HttpError) -> None:
        """Answer the arriving request with an error, after the answers before it, then end the connection."""
        if self._arrival.part == "rest":
            return
        if self._arrival.part == "body" and self.cycle.response_started:
            self.cycle.keep_alive = False
        else:
            self._refusal = as_bytes(error, dict(self.headers))
            if self._arrival.part == "body":  # which will not come: to the application the client has left
                self.cycle.disconnected = True
                self.cycle.message_event.set()
                if self.pipeline:
                    self.pipeline.popleft()
        self._arrival.expect("rest")
        if not self._is_answering:
            self._end_if_refused()
            self.close()

    def _end_if_refused(self) -> None:
        if self._refusal and not self._is_answering:
            self.transport.write(self._refusal)
            self._refusal = b""
            self.close()

    @property
    def _is_answering(self) -> bool:
        first = self._answered
        if first is None or first.response_complete or first.disconnected:
            return False
        return self._arrival.part != "body" or first is not self.cycle

    # -- the transport of the answers -------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        return self._lingers or self.transport.is_closing()

    def close(self) -> None:
        """End the connection once the client has sent what it is sending, or enough of it.

        A socket closed before that resets the connection, and the answer is lost."""
        if self.is_closing():
            return
        if self._arrival.part == "none":
            self.transport.close()
            return
        self._lingers = True
        self._arrival.expect("rest")
        if self.transport.can_write_eof():  # not with TLS
            with contextlib.suppress(OSError):  # the client has reset it
                self.transport.write_eof()
        self.flow.resume_reading()
        self._arrival.hurry(_BODY_S, self.transport.abort)


def as_bytes(error: HttpError, headers: Headers) -> bytes:
    body = encoder.encode(error_object(error))
    fields = {
        b"content-type": JSON,
        b"content-length": b"%d" % len(body),
        b"x-request-id": request_id(headers).encode(),
        b"connection": b"close",
        **error.headers,
    }
    head = b"".join([b"%b: %b\r\n" % field for field in fields.items()])
    phrase = http.HTTPStatus(error.status).phrase.encode()
    return b"HTTP/1.1 %d %b\r\n%b\r\n%b" % (error.status, phrase, head, body)


def _wrong_head(
    url: bytes, headers: list[tuple[bytes, bytes]], parser: httptools.HttpRequestParser
) -> HttpError | None:
    """Return why a request cannot be taken; None if its head is in order."""
    size = len(url) + sum([len(name) + len(value) + 4 for name, value in headers])
    if len(headers) > MAX_HEADER_LINES or size > MAX_HEADER_BYTES:
        return _too_large()
    try:
        path = httptools.parse_url(url).path
    except httptools.HttpParserInvalidURLError:
        path = None
    if path is None or parser.get_method() == b"CONNECT":
        return HttpError(400, "the address of this request is no path on this server", "invalid_http")
    hosts = sum([name == b"host" for name, _ in headers])
    if hosts > 1 or (hosts == 0 and parser.get_http_version() != "1.0"):
        return HttpError(400, f"a request has one Host header, not {hosts}", "invalid_http")
    return None


def _too_large() -> HttpError:
    return HttpError(431, "the head of this request is larger than this server takes", "headers_too_large")
