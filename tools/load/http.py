"""Sends `/v1/completions` over many kept connections, one request at a time on each.

It costs less than the server: a request is one send, a response is parsed by llhttp and msgspec."""

from __future__ import annotations

import selectors
import socket
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from tools.load.checking import Request, Sink

_READ_BYTES = 65536
_CONNECT_S = 5.0


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    code: str | int | None = None
    type: str = ""


class _Completion(msgspec.Struct):
    """A response, or one event of a stream; unknown fields are ignored."""

    choices: list[_Choice] = []
    error: _Error | None = None


_decoder = msgspec.json.Decoder(_Completion)


class ResponseReader:
    """Turns the bytes of a connection's responses into calls of a sink.

    `begin` names the request whose response comes next; `ended` says that it has come."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.name, self.ended, self.keep_alive = -1, True, True

    def begin(self, name: int) -> None:
        self.name, self.ended = name, False
        self._body, self._streams, self._reason, self._code = b"", False, "", ""

    def feed(self, data: bytes, sink: Sink) -> None:
        """Read bytes. Raises ValueError for a malformed response, and for one without a request."""
        if self.ended:
            raise ValueError("a response without a request")
        self._sink = sink
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ValueError(f"not a response: {error.__context__ or error}") from None

    # -- what httptools calls ---------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._streams = value.startswith(b"text/event-stream")

    def on_body(self, body: bytes) -> None:
        self._body += body
        if self._streams:
            *events, self._body = self._body.split(b"\n\n")
            for event in events:
                data = event.removeprefix(b"data:").strip()
                if event.startswith(b"data:") and data != b"[DONE]":
                    self._take(data)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        self.keep_alive, self.ended = self._parser.should_keep_alive(), True
        if not self._streams and self._body:
            self._take(self._body)
        if status != 200 or self._code or not self._reason:
            self._sink.fail(self.name, "overloaded" if status in (429, 503) else self._code or f"status {status}")
        else:
            self._sink.end(self.name, self._reason, "")

    def _take(self, data: bytes) -> None:
        message = _decoder.decode(data)
        if message.error is not None:
            self._code = str(message.error.code or message.error.type or "error")
        for choice in message.choices:
            self._sink.piece(self.name, choice.token_ids, choice.text)
            self._reason = choice.finish_reason or self._reason


class Http:
    """A `Transport` to the server at `url`, with at most `most` connections, opened when needed."""

    def __init__(self, url: str, model: str, most: int, stream: bool = True) -> None:
        where = urlsplit(url)
        self._address = (where.hostname or "127.0.0.1", where.port or 80)
        self._model, self._most, self._stream = model, most, stream
        self._selector = selectors.DefaultSelector()
        self._idle: list[socket.socket] = []
        self._readers: dict[socket.socket, ResponseReader] = {}

    def send(self, request: Request) -> bool:
        connection = self._idle.pop() if self._idle else self._connect()
        if connection is None:
            return False
        data = self._bytes(request)
        try:
            sent = connection.send(data)
        except OSError:  # the server has closed it meanwhile, as it may
            sent = 0
        if sent < len(data):
            self._drop(connection)
            return False
        self._readers[connection].begin(request.name)
        return True

    def receive(self, timeout_s: float, sink: Sink) -> None:
        for key, _ in self._selector.select(timeout_s):
            connection: socket.socket = key.fileobj  # type: ignore[assignment]
            reader: ResponseReader = key.data
            busy = not reader.ended
            try:
                data = connection.recv(_READ_BYTES)
                if data:
                    reader.feed(data, sink)
            except (OSError, ValueError):
                data = b""
            if busy and reader.ended and reader.keep_alive:
                self._idle.append(connection)
            elif reader.ended or not data:
                if not reader.ended:
                    sink.fail(reader.name, "disconnected")
                self._drop(connection)

    def close(self) -> None:
        for connection in list(self._readers):
            self._drop(connection)
        self._selector.close()

    def _connect(self) -> socket.socket | None:
        if len(self._readers) >= self._most:
            return None
        try:
            connection = socket.create_connection(self._address, _CONNECT_S)
        except OSError:
            return None
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._readers[connection] = ResponseReader()
        self._selector.register(connection, selectors.EVENT_READ, self._readers[connection])
        return connection

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._readers[connection]
        if connection in self._idle:
            self._idle.remove(connection)
        connection.close()

    def _bytes(self, request: Request) -> bytes:
        params = request.params
        asked: dict[str, Any] = {
            "model": self._model,
            "prompt": request.prompt,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "seed": params.seed,
            "ignore_eos": params.ignore_eos,
            "stream": self._stream,
            "return_token_ids": True,
        }
        body = msgspec.json.encode(asked)
        host = f"{self._address[0]}:{self._address[1]}"
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
