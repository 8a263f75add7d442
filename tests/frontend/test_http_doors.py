"""Who is let in, and how: keys in two headers, pages of other origins, TLS."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssd.config.engine import ServerConfig
from ssd.errors import UsageError
from ssd.ipc.messages import Emission
from ssd.launch.server import ServerOptions, resolve_server
from tests.frontend.http_engine import HttpEngine, answering, http_engine, key_file
from tests.scripted_engine import PATIENCE_S

BODY = {"prompt": "a", "max_tokens": 1}
COMPLETIONS = "/v1/completions"
IDS = [5, 6, 7]

# -- keys -----------------------------------------------------------------------------------------------------------


def test_keys_come_from_a_file_and_from_the_configuration_in_either_header(tmp_path: Path) -> None:
    file = key_file(tmp_path, "filed")
    server = ServerConfig(names=("scripted",), port=0, api_key_file=file, api_keys=("given", "other"))
    with http_engine(server) as engine, answering(engine, IDS):
        for key in ("filed", "given", "other"):
            for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                assert engine.ask("POST", COMPLETIONS, BODY, headers)[0] == 200
        for headers in (
            {"x-api-key": "wrong"},
            {"x-api-key": ""},
            {"authorization": "Bearer wrong", "x-api-key": "given"},
        ):
            assert engine.ask("POST", COMPLETIONS, BODY, headers)[0] == 401
        for path in ("/health", "/health/ready", "/health/live"):
            assert engine.ask("GET", path)[0] == 200


@pytest.mark.parametrize("key", ["", "a b", "é", "a\n"])
def test_a_key_that_no_header_can_carry_is_refused_before_the_start(key: str) -> None:
    with pytest.raises(UsageError, match="--api-key"):
        resolve_server(ServerOptions(api_key=(key,)), "model")


def test_a_key_lets_other_machines_in() -> None:
    assert resolve_server(ServerOptions(host="0.0.0.0", api_key=("k",)), "model").api_keys == ("k",)
    with pytest.raises(UsageError, match="lets other machines in"):
        resolve_server(ServerOptions(host="0.0.0.0"), "model")


# -- pages of other origins -----------------------------------------------------------------------------------------

PAGE = "https://app.example"


@pytest.fixture(scope="module")
def known() -> Iterator[HttpEngine]:
    server = ServerConfig(names=("scripted",), port=0, api_keys=("k",), allow_origins=(PAGE, "null"))
    with http_engine(server) as engine, answering(engine, IDS):
        yield engine


def preflight(engine: HttpEngine, origin: str, path: str = COMPLETIONS) -> tuple[int, dict[str, str]]:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
    status, headers, _ = engine.ask("OPTIONS", path, headers={"origin": origin, **asked})
    return status, headers


@pytest.mark.parametrize("origin", [PAGE, "null"])
def test_a_page_that_is_let_in_is_told_so_before_it_has_shown_its_key(known: HttpEngine, origin: str) -> None:
    status, headers = preflight(known, origin)
    assert status == 204
    assert headers["access-control-allow-origin"] == origin and headers["vary"] == "origin"
    assert headers["access-control-allow-methods"] == "POST"
    assert headers["access-control-allow-headers"] == "authorization, content-type"


@pytest.mark.parametrize("body", [BODY, BODY | {"stream": True}, BODY | {"temperature": "hot"}], ids=str)
def test_it_may_read_answers_streams_and_errors(known: HttpEngine, body: dict[str, object]) -> None:
    for key in ("k", "wrong"):
        sent = {"origin": PAGE, "authorization": f"Bearer {key}"}
        _, headers, _ = known.ask("POST", COMPLETIONS, body, sent)
        assert headers["access-control-allow-origin"] == PAGE
        exposed = headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "request-id", "retry-after", "x-ratelimit-remaining-tokens"} <= {*exposed}


@pytest.mark.parametrize("origin", ["https://app.example.evil", "http://app.example", "https://app.example:81", ""])
def test_other_pages_are_not(known: HttpEngine, origin: str) -> None:
    status, headers = preflight(known, origin)
    assert status == 401
    found = known.ask("GET", "/v1/models", headers={"origin": origin, "authorization": "Bearer k"})
    assert found[0] == 200
    for each in (headers, found[1]):
        assert not [name for name in each if name.startswith("access-control")]


def test_a_preflight_repeats_no_nonsense_and_knows_the_paths(known: HttpEngine) -> None:
    assert preflight(known, PAGE, "/nonesuch")[0] == 401
    sent = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "a: b"}
    status, headers, _ = known.ask("OPTIONS", COMPLETIONS, headers=sent)
    assert (status, headers.get("access-control-allow-headers")) == (204, None)


def test_all_pages_are_let_in_by_a_star() -> None:
    with http_engine(ServerConfig(names=("scripted",), port=0, allow_origins=("*",))) as engine:
        assert preflight(engine, "https://any.example")[0] == 204
        _, headers, _ = engine.ask("GET", "/v1/models", headers={"origin": "https://any.example"})
        assert headers["access-control-allow-origin"] == "*" and "vary" not in headers
        assert engine.ask("GET", "/v1/models", headers={"host": "evil.example"})[0] == 403, "names are still checked"


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "https://a, https://b", ""])
def test_an_origin_that_no_browser_sends_is_refused_before_the_start(origin: str) -> None:
    with pytest.raises(UsageError, match="--allow-origin"):
        resolve_server(ServerOptions(allow_origin=(origin,)), "model")


# -- TLS ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate of 127.0.0.1 that vouches for itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    options = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=ssd"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run(
        ["openssl", "req", "-x509", *options, *names, "-keyout", key, "-out", cert], check=True, capture_output=True
    )
    return cert, key


@pytest.fixture(scope="module")
def secure(certificate: tuple[str, str]) -> Iterator[HttpEngine]:
    server = ServerConfig(names=("scripted",), port=0, ssl_certfile=certificate[0], ssl_keyfile=certificate[1])
    with http_engine(server) as engine:
        yield engine


def https(engine: HttpEngine, certificate: tuple[str, str]) -> http.client.HTTPSConnection:
    context = ssl.create_default_context(cafile=certificate[0])
    return http.client.HTTPSConnection("127.0.0.1", engine.port, timeout=PATIENCE_S, context=context)


def ask(connection: http.client.HTTPSConnection, **body: object) -> None:
    connection.request("POST", COMPLETIONS, json.dumps(BODY | body), {"content-type": "application/json"})


@pytest.mark.parametrize("stream", [False, True])
def test_answers_come_over_tls(secure: HttpEngine, certificate: tuple[str, str], stream: bool) -> None:
    connection = https(secure, certificate)
    for _ in range(2):  # the connection is kept
        ask(connection, stream=stream)
        request = secure.engine.target.next_submit().request
        secure.engine.target.step(Emission(request, [5], finish_reason="stop"))
        answer = connection.getresponse()
        assert answer.status == 200 and b'"stop"' in answer.read()
    connection.close()


def test_a_client_that_leaves_tls_ends_its_request(secure: HttpEngine, certificate: tuple[str, str]) -> None:
    connection = https(secure, certificate)
    ask(connection, max_tokens=100)
    request = secure.engine.target.next_submit().request
    connection.close()
    secure.engine.target.wait_abort(request)


def test_a_body_that_is_too_large_is_told_over_tls(secure: HttpEngine, certificate: tuple[str, str]) -> None:
    connection = https(secure, certificate)
    ask(connection, prompt="a" * 20 * 2**20)
    assert connection.getresponse().status == 413
    connection.close()


def test_what_is_no_tls_is_let_go(secure: HttpEngine, certificate: tuple[str, str]) -> None:
    for said in (b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", b"\x16\x03\x01\xff\xff" + b"\0" * 100, b""):
        client = socket.create_connection(("127.0.0.1", secure.port))
        client.settimeout(PATIENCE_S)
        client.sendall(said)
        client.shutdown(socket.SHUT_WR)
        assert b"HTTP/1.1 200" not in client.recv(65536)
        client.close()
    connection = https(secure, certificate)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()


def test_certificates_are_read_before_the_start(certificate: tuple[str, str], tmp_path: Path) -> None:
    cert, key = certificate
    both = tmp_path / "both.pem"
    both.write_text(Path(cert).read_text() + Path(key).read_text())
    assert resolve_server(ServerOptions(ssl_certfile=str(both)), "model").ssl_keyfile is None
    for options in (
        ServerOptions(ssl_certfile=cert),
        ServerOptions(ssl_certfile=str(tmp_path / "none")),
        ServerOptions(ssl_certfile=key, ssl_keyfile=cert),
        ServerOptions(ssl_keyfile=key),
    ):
        with pytest.raises(UsageError, match="--ssl-"):
            resolve_server(options, "model")


def test_certificates_are_regular_files_of_bounded_size(certificate: tuple[str, str], tmp_path: Path) -> None:
    """A pipe to which nobody writes would be waited for."""
    cert, _ = certificate
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    with large.open("wb") as file:
        file.truncate(2**30)
    for options, said in (
        (ServerOptions(ssl_certfile=str(pipe)), f"--ssl-certfile: {pipe} is no regular file"),
        (ServerOptions(ssl_certfile=cert, ssl_keyfile=str(pipe)), f"--ssl-keyfile: {pipe} is no regular file"),
        (ServerOptions(ssl_certfile=cert, ssl_keyfile=str(large)), f"--ssl-keyfile: {large} is larger than"),
        (ServerOptions(ssl_certfile=str(tmp_path)), "--ssl-certfile: "),
    ):
        with pytest.raises(UsageError, match=said):
            resolve_server(options, "model")
