"""What one connection may do: heads, bodies and what is between them, in bytes and in seconds; pipelining; leaving."""

from __future__ import annotations

import json
import resource
import socket
import threading
import time

import pytest

from ssd.config.engine import ServerConfig
from ssd.frontend.http import connection, server
from ssd.ipc.listening import listen
from ssd.ipc.messages import Emission
from ssd.ipc.public import Describe, Description
from tests.frontend.http_engine import HttpEngine, http_engine
from tests.frontend.raw_client import RawClient
from tests.frontend.test_http_limits import BODY, HEAD, LIMITS, SERVER, raw, until_closed
from tests.scripted_engine import PATIENCE_S, engine_config, gateway_process, scripted_engine

IDS = [5, 6, 7]
TOKENIZE = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"


def completion(**changes: object) -> bytes:
    body = json.dumps(BODY | changes).encode()
    return HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body)


def error(answer: bytes) -> tuple[int, dict[str, str], str]:
    """(status, headers, code) of the one answer that there is, which must be an error of ours."""
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    assert len(body) == int(headers["content-length"]), "more than one answer"
    return int(first.split()[1]), headers, json.loads(body)["error"]["code"]


def until_done(client: socket.socket) -> bytes:
    """A stream, up to its end."""
    found = b""
    while not found.endswith(b"0\r\n\r\n"):
        part = client.recv(65536)
        assert part, found
        found += part
    return found


# -- in bytes -------------------------------------------------------------------------------------------------------


def test_nobody_reads_trailers(http: HttpEngine) -> None:
    client = raw(http)
    body = json.dumps(BODY).encode()
    trailers = b"".join(b"x-%d: y\r\n" % n for n in range(connection.MAX_HEADER_LINES + 1))
    client.sendall(CHUNKED % b"/v1/completions" + b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, trailers))
    assert client.recv(65536).split()[1] == b"200"
    client.close()


@pytest.mark.parametrize(
    ("begun", "filler"),
    [
        (b"GET /health HTTP/1.1\r\nx: ", b"y"),
        (CHUNKED % b"/v1/completions" + b"0\r\nx: ", b"x: y\r\n"),
        (CHUNKED % b"/v1/completions" + b"0\r\nx: ", b"y"),
        (CHUNKED % b"/nonesuch" + b"0\r\nx: ", b"x: y\r\n"),
        (CHUNKED % b"/nonesuch" + b"0\r\nx: ", b"y"),
    ],
    ids=["head", "lines before the answer", "line before the answer", "lines after it", "line after it"],
)
def test_heads_and_trailers_without_end_are_cut_off(http: HttpEngine, begun: bytes, filler: bytes) -> None:
    client = raw(http)
    client.sendall(begun)
    sent, part = 0, filler * (2**20 // len(filler))
    try:
        while sent < 300 * 2**20:
            client.sendall(part)
            sent += len(part)
    except (BrokenPipeError, ConnectionResetError):
        pass
    client.close()
    assert sent < 300 * 2**20
    assert http.ask("GET", "/health")[0] == 200


@pytest.mark.parametrize(
    "garbage", [b"\x16\x03\x01\x02\x00", b"SSH-2.0-x\r\n", b"GET\r\n\r\n", b"\0" * 1000, b"GET / HTTP/9.9\r\n\r\n"]
)
def test_nonsense_is_refused_by_name_and_the_connection_ends(http: HttpEngine, garbage: bytes) -> None:
    client = raw(http)
    client.sendall(garbage)
    status, headers, code = error(until_closed(client))
    assert (status, code, len(headers["x-request-id"])) == (400, "invalid_http", 32)
    client.close()
    assert http.ask("GET", "/health")[0] == 200


# -- in seconds -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("begun", "part"),
    [
        (b"GET /health HTTP/1.1\r\nx:", "head"),
        (HEAD + b"content-length: 100\r\n\r\n{", "body"),
        (CHUNKED % b"/v1/completions" + b"1\r\n{\r\n0\r\nx: y\r\n", "body"),
    ],
    ids=["head", "body", "trailers"],
)
def test_what_does_not_arrive_is_not_waited_for(http: HttpEngine, begun: bytes, part: str) -> None:
    client = raw(http)
    client.sendall(begun)
    answer = until_closed(client)
    assert error(answer)[::2] == (408, "request_timeout")
    assert f"the {part} of the request did not arrive within 0.2 s" in answer.decode()


@pytest.mark.usefixtures("hasty")
def test_a_client_that_says_nothing_is_let_go(http: HttpEngine) -> None:
    assert until_closed(raw(http)) == b""


@pytest.mark.usefixtures("hasty")
def test_the_rest_of_a_body_that_has_its_answer_is_not_waited_for(http: HttpEngine) -> None:
    client = raw(http)
    client.sendall(b"POST /nonesuch HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
    assert error(until_closed(client))[::2] == (404, "not_found")


# -- many -----------------------------------------------------------------------------------------------------------


def test_too_many_connections_are_refused_before_they_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_OTHER_CONNECTIONS", 0)
    with http_engine(SERVER) as engine:
        open_ones = [raw(engine) for _ in range(2 * LIMITS.max_open_requests)]
        status, headers, code = error(until_closed(raw(engine)))
        assert (status, code, headers["retry-after"], len(headers["x-request-id"])) == (429, "overloaded", "1", 32)
        open_ones[-1].sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert open_ones[-1].recv(65536).startswith(b"HTTP/1.1 200")
        for client in open_ones:
            client.close()
        deadline = time.monotonic() + PATIENCE_S
        while engine.ask("GET", "/version")[0] != 200:
            assert time.monotonic() < deadline


def test_connections_leave_descriptors_for_what_else_there_is() -> None:
    """Before, 1000 idle ones used all of 512 descriptors, and the next ZeroMQ client ended the process."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[1], 4096), limits[1]))
    listening = listen(ServerConfig(port=0))
    with scripted_engine() as engine:
        config = engine_config(server=ServerConfig(names=("scripted",)))
        http = HttpEngine(listening.getsockname()[1], engine)
        with gateway_process(engine, config, listening.fileno(), descriptors=512) as process:
            engine.target.shake_hands()
            assert engine.status() == "ready"
            stream = raw(http)
            stream.sendall(completion(stream=True, max_tokens=9))
            request = engine.target.next_submit().request
            idle = [raw(http) for _ in range(1000)]
            assert [error(until_closed(client))[::2] for client in idle[255:]] == [(429, "overloaded")] * 745
            client = RawClient(engine.address)
            assert isinstance(client.ask(Describe()), Description)
            client.close()
            idle[0].sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert idle[0].recv(65536).startswith(b"HTTP/1.1 200")
            engine.target.step(Emission(request, [5], finish_reason="stop"))
            assert b"[DONE]" in until_done(stream)
            assert process.poll() is None
            for client in (stream, *idle):
                client.close()
    listening.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# -- pipelining -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [True, False])
def test_a_client_that_has_asked_again_and_leaves_ends_what_it_asked_first(
    scripted: HttpEngine, together: bool
) -> None:
    client = raw(scripted)
    client.sendall(completion() + (completion() if together else b""))
    request = scripted.engine.target.next_submit().request
    if not together:
        client.sendall(completion())
        # An answer on another connection: what was sent before it has been read.
        assert scripted.ask("GET", "/version")[0] == 200
    client.close()
    scripted.engine.target.wait_abort(request)
    assert not scripted.engine.target.open


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_nonsense_after_a_request_is_refused_when_that_has_its_answer(
    scripted: HttpEngine, stream: bool, together: bool
) -> None:
    client, target = raw(scripted), scripted.engine.target
    client.sendall(completion(stream=stream, max_tokens=9) + (b"\0" * 100 if together else b""))
    request = target.next_submit().request
    target.step(Emission(request, [5]))
    if not together:
        client.sendall(b"\0" * 100)
    assert scripted.ask("GET", "/version")[0] == 200, "what was sent before has been read"
    target.step(Emission(request, [5], finish_reason="stop"))
    answer, _, refusal = until_closed(client).rpartition(b"HTTP/1.1 400")
    assert answer.startswith(b"HTTP/1.1 200") and b'"finish_reason":"stop"' in answer
    assert error(b"HTTP/1.1 400" + refusal)[::2] == (400, "invalid_http")


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("part", ["head", "body"])
def test_what_waits_behind_an_answer_has_its_time_after_it(scripted: HttpEngine, part: str) -> None:
    """Before, the deadline ran meanwhile, and cut the stream."""
    client, target = raw(scripted), scripted.engine.target
    first, second = completion(stream=True, max_tokens=9), completion(prompt="x" * 3000)
    begun = 2900 if part == "body" else 30
    client.sendall(first + second[:begun])
    request = target.next_submit().request
    late = raw(scripted)
    late.sendall(second[:begun])
    assert error(until_closed(late))[0] == 408
    client.sendall(second[begun:-1])
    target.step(Emission(request, [5], finish_reason="stop"))
    answer, _, refusal = until_closed(client).rpartition(b"HTTP/1.1 408")
    assert answer.startswith(b"HTTP/1.1 200") and b"[DONE]" in answer
    assert error(b"HTTP/1.1 408" + refusal)[::2] == (408, "request_timeout")


def test_a_body_that_is_too_long_to_be_read_before_its_turn_is_read_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_BODY_S", 0.5)
    with http_engine() as engine:
        client, target = raw(engine), engine.engine.target
        client.sendall(completion(stream=True, max_tokens=9))
        request = target.next_submit().request
        body = completion(prompt="x" * 2**20)
        sending = threading.Thread(target=client.sendall, args=(body,))
        sending.start()
        late = raw(engine)
        late.sendall(body[:-1])
        assert error(until_closed(late))[0] == 408
        target.step(Emission(request, [5], finish_reason="stop"))
        sending.join(PATIENCE_S)
        client.shutdown(socket.SHUT_WR)
        answer, _, refusal = until_closed(client).rpartition(b"HTTP/1.1 400")
        assert answer.startswith(b"HTTP/1.1 200") and b"[DONE]" in answer
        assert error(b"HTTP/1.1 400" + refusal)[::2] == (400, "context_length_exceeded")


# -- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\n%b\r\n", 200),
        (b"GET /nonesuch HTTP/1.1\r\nhost: localhost\r\n%b\r\n", 404),
        (b"PUT /health HTTP/1.1\r\nhost: localhost\r\n%b\r\n", 405),
        (TOKENIZE + b"%bcontent-length: 5000\r\n\r\n", 413),
        (TOKENIZE + b"%bcontent-type: text/plain\r\n\r\n", 415),
        (TOKENIZE + b"%bcontent-length: 1\r\n\r\n{", 400),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\n%b" + b"x: y\r\n" * connection.MAX_HEADER_LINES + b"\r\n", 431),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\n%bx: " + b"y" * connection.MAX_HEADER_BYTES, 431),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\n%bx: y\r\nno header\r\n\r\n", 400),
    ],
)
def test_every_answer_has_a_request_id(http: HttpEngine, head: bytes, status: int) -> None:
    for given in (b"x-request-id: mine\r\n", b""):
        client = raw(http)
        client.sendall(head % given)
        lines = client.recv(65536).partition(b"\r\n\r\n")[0].decode().split("\r\n")
        client.close()
        (name,) = [line.partition(": ")[2] for line in lines if line.startswith("x-request-id: ")]
        assert lines[0].split()[1] == str(status)
        assert name == "mine" if given else len(name) == 32


# -- the end of the server ------------------------------------------------------------------------------------------


def test_at_the_end_no_connection_stays_open_and_half_a_request_is_refused() -> None:
    with http_engine() as engine:
        idle, head, body = [raw(engine) for _ in range(3)]
        head.sendall(b"GET /health HTTP/1.1\r\n")
        body.sendall(HEAD + b"content-length: 100\r\n\r\n{")
        assert engine.ask("GET", "/version")[0] == 200, "what was sent before has been read"
    assert until_closed(idle) == b""
    for client in (head, body):
        assert error(until_closed(client))[::2] == (503, "shutting_down")
