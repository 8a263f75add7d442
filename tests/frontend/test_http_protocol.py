"""HTTP/1.1 as clients really speak it: offers of other protocols, answers before the end of a request, half-closed
connections; and what a web page must not be able to ask."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssd.config.engine import ServerConfig
from ssd.ipc.messages import Emission
from tests.frontend.http_engine import HttpEngine, answering, http_engine, key_file
from tests.frontend.test_http_connection import completion, error
from tests.frontend.test_http_limits import BODY, HEAD, LIMITS, SERVER, raw, until_closed

__all__ = ["SERVER"]
IDS = [5, 6, 7]
JSON = json.dumps(BODY).encode()
UNTYPED = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n%bcontent-length: %d\r\n\r\n"
MIB = 2**20


# -- offers of another protocol -------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("piece", [1, 65536], ids=["byte by byte", "at once"])
def test_an_offer_of_http_2_is_answered_in_http_1(http: HttpEngine, chunked: bool, piece: int) -> None:
    """As Java's default client and `curl --http2` make it; the parser left the body out."""
    body = json.dumps(BODY).encode()
    head = HEAD + b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
    if chunked:
        one = head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    else:
        one = head + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    upgraded_get = b"GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    said = one + upgraded_get + one + b"GET /version HTTP/1.0\r\n\r\n"
    client = raw(http)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for start in range(0, len(said), piece):
        client.sendall(said[start : start + piece])
    answer = until_closed(client)
    assert answer.count(b"HTTP/1.1 200") == answer.count(b"HTTP/1.1 ") == 4
    assert answer.count(b'"text_completion"') == answer.count(b'"version"') == 2


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_an_offer_on_a_connection_that_ends_is_answered(http: HttpEngine, version: bytes) -> None:
    client = raw(http)
    fields = b"host: localhost\r\nconnection: upgrade, close\r\nupgrade: x\r\n\r\n"
    client.sendall(b"GET /version HTTP/%b\r\n%b" % (version, fields))
    assert until_closed(client).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "head",
    [
        b"CONNECT a:1 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"CONNECT http://localhost/health HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET http://[::1 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET http://localhost HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n\r\n",
    ],
)
def test_an_address_that_is_none_of_ours_is_refused(http: HttpEngine, head: bytes) -> None:
    client = raw(http)
    client.sendall(head)
    assert error(until_closed(client))[::2] == (400, "invalid_http")


# -- answers before the end of a request ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("begun", "status"),
    [
        (HEAD + b"content-length: %d\r\n\r\n" % (20 * MIB), 413),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1400000\r\n", 413),
        (b"GET /health HTTP/1.1\r\nx: ", 431),
        (b"SSH-2.0-x\r\n", 400),
    ],
    ids=["length", "chunked", "head", "nonsense"],
)
def test_a_client_that_is_still_sending_gets_its_answer(http: HttpEngine, begun: bytes, status: int) -> None:
    """Before, the connection was reset after some hundred kilobytes."""
    client = raw(http)
    client.sendall(begun)
    for _ in range(64):
        client.sendall(b" " * MIB)
    assert error(until_closed(client))[0] == status
    client.close()


@pytest.mark.usefixtures("hasty")
def test_a_client_that_has_its_answer_and_goes_on_sending_is_let_go(http: HttpEngine) -> None:
    client = raw(http)
    client.sendall(HEAD + b"content-length: %d\r\n\r\n" % (20 * MIB))
    assert error(until_closed(client))[0] == 413
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        while True:
            client.sendall(b" ")


# -- clients that say no more ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_half_closed_client_gets_its_answers(scripted: HttpEngine, stream: bool, version: bytes) -> None:
    client, target = raw(scripted), scripted.engine.target
    asked = completion(stream=stream, max_tokens=9)
    client.sendall(asked + asked.replace(b"HTTP/1.1", b"HTTP/" + version))
    client.shutdown(socket.SHUT_WR)
    for _ in range(2):
        request = target.next_submit().request
        assert scripted.ask("GET", "/version")[0] == 200, "the end has been read"
        target.step(Emission(request, [5]))
        target.step(Emission(request, [5], finish_reason="stop"))
    answer = until_closed(client)
    assert answer.count(b"HTTP/1.1 200") == answer.count(b'"finish_reason":"stop"') == 2
    assert answer.count(b"HTTP/1.1 ") - answer.count(b"HTTP/1.1 100 Continue\r\n\r\n") == 2


@pytest.mark.parametrize("cut", [-1, 30], ids=["body", "head"])
def test_a_request_that_ends_early_is_refused_after_the_answer_before(http: HttpEngine, cut: int) -> None:
    client = raw(http)
    client.sendall(completion() + completion()[:cut])
    client.shutdown(socket.SHUT_WR)
    answer, _, refusal = until_closed(client).rpartition(b"HTTP/1.1 400")
    assert b"HTTP/1.1 200" in answer
    assert error(b"HTTP/1.1 400" + refusal)[::2] == (400, "invalid_http")


def test_a_client_that_first_says_no_more_and_then_leaves_ends_its_stream(scripted: HttpEngine) -> None:
    client, target = raw(scripted), scripted.engine.target
    client.sendall(completion(stream=True, max_tokens=9))
    request = target.next_submit().request
    client.shutdown(socket.SHUT_WR)
    assert client.recv(100).startswith(b"HTTP/1.1 100")
    client.close()
    target.step(Emission(request, [5]))
    target.wait_abort(request)


# -- what a web page may not ask ------------------------------------------------------------------------------------


FORM = b"content-type: application/x-www-form-urlencoded\r\n"
BROWSERS = (b"origin: null", b"origin: http://localhost", b"origin: http://127.0.0.1:8000", b"sec-fetch-site: none")


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        (b"", b"200"),  # from this machine, and not from a browser
        (b"content-type:\r\n", b"200"),
        (FORM, b"200"),
        (b"content-type: application/json\r\n", b"200"),
        (b"content-type: Application/JSON; charset=utf-8\r\n", b"200"),
        (b"content-type: text/plain\r\n", b"415"),
        (b"content-type: multipart/form-data\r\n", b"415"),
        *((kind + browser + b"\r\n", b"415") for kind in (b"", FORM) for browser in BROWSERS),
    ],
)
def test_a_body_must_say_it_is_json_where_a_page_may_send_it(http: HttpEngine, fields: bytes, status: bytes) -> None:
    client = raw(http)
    client.sendall(UNTYPED % (fields, len(JSON)) + JSON)
    assert client.recv(65536).split()[1] == status
    client.close()


def test_a_form_is_no_json_and_a_byte_order_mark_no_part_of_it(http: HttpEngine) -> None:
    client = raw(http)
    client.sendall(UNTYPED % (FORM, 10) + b"prompt=Why")
    assert client.recv(65536).split()[1] == b"400"
    client.close()
    assert http.ask("POST", "/v1/completions", b"\xef\xbb\xbf" + JSON)[0] == 200


def test_who_may_open_a_unix_socket_is_asked_for_no_name_nor_type(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with http_engine(ServerConfig(names=("scripted",), uds=str(path))) as engine, answering(engine, IDS):
        for said, status in (
            (b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", b"200"),
            (b"GET /health HTTP/1.1\r\nhost: any.example\r\n\r\n", b"200"),
            (UNTYPED % (b"", len(JSON)) + JSON, b"200"),
            (UNTYPED % (b"origin: http://127.0.0.1\r\n", len(JSON)) + JSON, b"415"),
        ):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
                client.sendall(said)
                assert client.recv(65536).split()[1] == status
        assert path.stat().st_mode & 0o777 == 0o600


def test_where_keys_say_who_may_ask_any_name_does(tmp_path: Path) -> None:
    server = ServerConfig(names=("scripted",), port=0, api_key_file=key_file(tmp_path, "key"))
    with http_engine(server) as engine:
        assert engine.ask("GET", "/health", headers={"host": "any.example"})[0] == 200


def test_no_other_origin_is_let_in(http: HttpEngine) -> None:
    asked = {
        "origin": "http://evil.example",
        "access-control-request-method": "POST",
        "access-control-request-private-network": "true",
    }
    for method, path, status in (("OPTIONS", "/v1/completions", 405), ("GET", "/v1/models", 200)):
        answered, headers, _ = http.ask(method, path, headers=asked)
        assert answered == status
        assert not [name for name in headers if name.startswith("access-control")]


@pytest.fixture(scope="module")
def named() -> Iterator[HttpEngine]:
    with http_engine(
        ServerConfig(names=("scripted",), port=0, limits=LIMITS, allowed_hosts=("Proxy.example",))
    ) as engine:
        yield engine


OTHERS = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "10.0.0.1",
    "",
    "0.0.0.0",
]


@pytest.mark.parametrize("host", OTHERS)
def test_a_server_for_this_machine_answers_to_no_other_name(named: HttpEngine, host: str) -> None:
    for path in ("/health", "/v1/models"):
        status, _, content = named.ask("GET", path, headers={"host": host})
        found = json.loads(content)["error"]
        assert (status, found["code"]) == (403, "host_not_allowed")
        assert repr(host) in found["message"] and "--allowed-host" in found["message"]


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:80",
        "ssd.localhost:1",
        "127.0.0.1",
        "127.8.8.8:9",
        "[::1]:8000",
        "[::1]",
        "proxy.example:80",
    ],
)
def test_it_answers_to_its_own_names(named: HttpEngine, host: str) -> None:
    assert named.ask("GET", "/health", headers={"host": host})[0] == 200


# -- paths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/models//", "/v1/models/scripted/"])
def test_slashes_at_the_end_change_no_path(http: HttpEngine, path: str) -> None:
    assert http.ask("GET", path)[0] == 200


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("/models", "/v1/models"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/models", "/v1/models"),
        ("/v1/chat/completions/models", "/v1/models"),
    ],
)
def test_a_wrong_base_url_gets_a_hint(http: HttpEngine, path: str, known: str) -> None:
    status, _, content = http.ask("GET", path)
    message = json.loads(content)["error"]["message"]
    assert status == 404 and f"; {known} is there" in message and "base URL that ends in /v1" in message


def test_other_paths_and_methods_are_refused(http: HttpEngine) -> None:
    status, _, content = http.ask("GET", "/nothing")
    assert status == 404 and "is there" not in json.loads(content)["error"]["message"]
    status, headers, _ = http.ask("GET", "/v1/completions")
    assert (status, headers["allow"]) == (405, "POST")


def test_an_error_repeats_128_characters_of_an_address(http: HttpEngine) -> None:
    content = http.ask("GET", "/" + "x" * 1500)[2]
    assert b"x" * 127 in content and b"x" * 128 not in content
