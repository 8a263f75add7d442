"""An HTTP client that says exactly what an attack wants, and takes whatever comes."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import httptools

from tests.attacks.registry import NONE, PATIENCE_S, Answer, Site

COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
_AT_ONCE = 32
_READ_BYTES = 65536


def connect(site: Site, patience: float = PATIENCE_S) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", site.port), patience)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def head(site: Site, path: str, length: int, *, method: str = "POST", **fields: str) -> bytes:
    """The head of a request for a JSON body. A field replaces the one that is sent else; "" leaves it out."""
    said = {"host": f"127.0.0.1:{site.port}", "content-type": "application/json", "content-length": str(length)}
    if site.api_key:
        said["authorization"] = f"Bearer {site.api_key}"
    said |= {name.replace("_", "-"): value for name, value in fields.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in said.items() if value)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def request(site: Site, path: str, body: object, **fields: str) -> bytes:
    """A whole request; a `body` that is no bytes is sent as JSON."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head(site, path, len(raw), **fields) + raw


def post(site: Site, path: str, body: object, *, patience: float = PATIENCE_S, **fields: str) -> Answer:
    return exchange(site, request(site, path, body, **fields), patience=patience)[0]


def exchange(
    site: Site, *parts: bytes, answers: int = 1, half_closed: bool = False, patience: float = PATIENCE_S
) -> list[Answer]:
    """Send `parts` and read so many answers; NONE for each that did not come before the server closed.

    Like most clients it reads when all is sent, and gives up where it cannot send all.
    """
    with connect(site, patience) as client:
        try:
            for part in parts:
                client.sendall(part)
            if half_closed:
                client.shutdown(socket.SHUT_WR)
        except OSError as error:
            return [Answer(NONE, f"{type(error).__name__} while it was sent: {error}")] * answers
        return read(client, answers)


def read(client: socket.socket, answers: int = 1) -> list[Answer]:
    """So many answers of a connection; NONE for each that did not come."""
    reader = _Reader()
    why = "closed without an answer"
    while len(reader.answers) < answers:
        try:
            data = client.recv(_READ_BYTES)
        except OSError as error:
            why = f"{type(error).__name__}: {error}"
            break
        if not data:
            break
        reader.feed(data)
    missing = answers - len(reader.answers)
    return reader.answers[:answers] + [Answer(NONE, why)] * missing


def at_once(calls: Sequence[Callable[[], Answer]]) -> Iterable[Answer]:
    """The answers of calls that are made side by side."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        yield from pool.map(lambda call: call(), calls)


class _Reader:
    """Parses responses that follow one another."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self._body = b""
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body = b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 100:
            self.answers.append(Answer(str(status), reason(self._body)))


def reason(body: bytes) -> str:
    """The message of an error, "" where there is none; of any other answer its text."""
    try:
        found = json.loads(body)
    except ValueError:
        return body.decode(errors="replace")
    error = found.get("error") if isinstance(found, dict) else None
    if isinstance(error, dict):
        return str(error.get("message", ""))
    return body.decode(errors="replace")
