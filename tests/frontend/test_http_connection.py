"""What one connection may do: heads, bodies and what is between them, in bytes and in seconds; pipelining; leaving."""

from __future__ import annotations

import json
import threading
import time

import pytest

from ssd.errors import SsdError
from ssd.frontend.http import connection
from ssd.frontend.process import Frontend, run
from ssd.ipc.listening import listen
from ssd.ipc.messages import Emission
from ssd.ipc.process import Child, Start
from tests.frontend.http_engine import HttpEngine
from tests.frontend.test_http_limits import BODY, LIMITS, SERVER, raw, until_closed
from tests.scripted_engine import PATIENCE_S, engine_config, scripted_engine

IDS = [5, 6, 7]
CHUNKED = b"POST %b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads and bodies have little time."""
    monkeypatch.setattr(connection, "_HEAD_S", 0.2)
    monkeypatch.setattr(connection, "_BODY_S", 0.2)


def completion(**changes: object) -> bytes:
    body = json.dumps(BODY | changes).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def error(answer: bytes) -> tuple[int, dict[str, str], str]:
    """(status, headers, code) of the one answer that there is, which must be an error of ours."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    assert len(body) == int(headers["content-length"]), "more than one answer"
    return int(status.split()[1]), headers, json.loads(body)["error"]["code"]


# -- in bytes -------------------------------------------------------------------------------------------------------


def test_the_address_is_part_of_the_head(http: HttpEngine) -> None:
    for size, status in ((2048, b"200"), (2049, b"431")):
        client = raw(http)
        client.sendall(b"GET /health?%b HTTP/1.1\r\n\r\n" % (b"x" * (size - len("/health?"))))
        assert client.recv(65536).split()[1] == status
        client.close()


def test_nobody_reads_trailers(http: HttpEngine) -> None:
    client = raw(http)
    body = json.dumps(BODY).encode()
    trailers = b"".join(b"x-%d: y\r\n" % n for n in range(LIMITS.max_header_lines + 1))
    client.sendall(CHUNKED % b"/v1/completions" + b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, trailers))
    assert client.recv(65536).split()[1] == b"200"
    client.close()


@pytest.mark.parametrize("path", [b"/v1/completions", b"/nonesuch"], ids=["before the answer", "after the answer"])
@pytest.mark.parametrize("filler", [b"x: y\r\n", b"y"], ids=["lines", "one line"])
def test_trailers_without_end_are_cut_off_early(http: HttpEngine, path: bytes, filler: bytes) -> None:
    client = raw(http)
    client.sendall(CHUNKED % path + b"0\r\nx: ")
    sent, part = 0, filler * (2**20 // len(filler))
    try:
        while sent < 64 * 2**20:
            client.sendall(part)
            sent += len(part)
    except (BrokenPipeError, ConnectionResetError):
        pass
    client.close()
    assert sent < 64 * 2**20


# -- in seconds -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("begun", "part"),
    [
        (b"GET /health HTTP/1.1\r\nx:", "head"),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-length: 100\r\n\r\n{", "body"),
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
    client.sendall(b"POST /nonesuch HTTP/1.1\r\ncontent-length: 100\r\n\r\n{")
    assert error(until_closed(client))[::2] == (404, "not_found")


# -- many -----------------------------------------------------------------------------------------------------------


def test_too_many_connections_are_refused_like_too_many_requests(
    http: HttpEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_OTHER_CONNECTIONS", 0)
    idle = [raw(http) for _ in range(2 * LIMITS.max_open_requests)]
    client = raw(http)
    client.sendall(b"GET /version HTTP/1.1\r\nx-request-id: mine\r\n\r\n")
    status, headers, code = error(until_closed(client))
    assert (status, code, headers["retry-after"], headers["x-request-id"]) == (503, "overloaded", "1", "mine")
    for connected in idle:
        connected.close()
    deadline = time.monotonic() + PATIENCE_S
    while http.ask("GET", "/version")[0] != 200:
        assert time.monotonic() < deadline


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


def test_nonsense_after_a_request_ends_the_connection_without_a_word_into_the_answer(scripted: HttpEngine) -> None:
    client = raw(scripted)
    client.sendall(completion(stream=True, max_tokens=9))
    request = scripted.engine.target.next_submit().request
    scripted.engine.target.step(Emission(request, [5]))
    answer = client.recv(65536)
    client.sendall(b"\0" * 100)
    answer += until_closed(client)
    scripted.engine.target.wait_abort(request)
    assert answer.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 400" not in answer


# -- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\n%b\r\n", 200),
        (b"GET /nonesuch HTTP/1.1\r\n%b\r\n", 404),
        (b"PUT /health HTTP/1.1\r\n%b\r\n", 405),
        (b"POST /tokenize HTTP/1.1\r\n%bcontent-length: 5000\r\n\r\n", 413),
        (b"POST /tokenize HTTP/1.1\r\n%bcontent-type: text/plain\r\n\r\n", 415),
        (b"POST /tokenize HTTP/1.1\r\n%bcontent-length: 1\r\n\r\n{", 400),
        (b"GET /health HTTP/1.1\r\n%b" + b"x: y\r\n" * 21 + b"\r\n", 431),
        (b"GET /health HTTP/1.1\r\n%bx: " + b"y" * 4000, 431),
        (b"GET /health HTTP/1.1\r\n%bx: y\r\nno header\r\n\r\n", 400),
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


def test_what_is_no_request_at_all_gets_a_name_too(http: HttpEngine) -> None:
    client = raw(http)
    client.sendall(b"SSH-2.0-x\r\n")
    status, headers, code = error(until_closed(client))
    assert (status, code, len(headers["x-request-id"])) == (400, "invalid_http", 32)


# -- the server itself ----------------------------------------------------------------------------------------------


def test_a_frontend_whose_http_breaks_ends_with_the_cause() -> None:
    async def break_down(counter: int) -> bool:
        raise RuntimeError("no more")

    causes: list[SsdError] = []
    with scripted_engine() as engine:
        listening = listen(SERVER).detach()
        child = Child(
            Start("frontend", 7, engine.directory, engine_config(server=SERVER), (), -1, -1, http_fd=listening)
        )
        frontend = Frontend(child)

        def serve() -> None:
            try:
                run(frontend.serve())
            except SsdError as cause:
                causes.append(cause)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        engine.target.shake_hands()
        assert engine.status() == "ready"
        assert frontend._http is not None
        frontend._http._server.on_tick = break_down  # type: ignore[method-assign]
        thread.join(PATIENCE_S)
        assert [str(cause) for cause in causes] == ["HTTP stopped: RuntimeError('no more')"]
        frontend._clients.destroy(linger=0)
        child.close()
