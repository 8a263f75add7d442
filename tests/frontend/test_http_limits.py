"""Every limit of the HTTP interface at its border, and what a hostile client may try."""

from __future__ import annotations

import json
import select
import socket
import time
from pathlib import Path

import pytest

from ssd.config.engine import Limits, ServerConfig
from ssd.frontend import request_manager
from ssd.frontend.http import connection
from ssd.frontend.http.connection import MAX_HEADER_LINES
from ssd.ipc.messages import Emission
from tests.frontend.http_engine import HttpEngine, answering, http_engine, key_file
from tests.scripted_engine import PATIENCE_S

LIMITS = Limits(
    max_open_requests=4,
    max_n=2,
    max_prompts=3,
    max_body_bytes=4096,
    slow_reader_seconds=0.5,
)
SERVER = ServerConfig(names=("scripted",), port=0, limits=LIMITS)
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
BODY = {"model": "scripted", "prompt": "a", "max_tokens": 1}
IDS = [5, 6, 7]


def raw(engine: HttpEngine) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", engine.port))
    client.settimeout(PATIENCE_S)
    return client


def until_closed(client: socket.socket) -> bytes:
    found = b""
    try:
        while part := client.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


def padded(size: int) -> bytes:
    """A valid body of `size` bytes."""
    body = json.dumps(BODY).encode()
    return body + b" " * (size - len(body))


# -- borders --------------------------------------------------------------------------------------------------------


def test_bodies(http: HttpEngine) -> None:
    assert http.ask("POST", COMPLETIONS, padded(4096))[0] == 200
    assert http.ask("POST", COMPLETIONS, padded(4097))[0] == 413


def test_bodies_that_do_not_tell_their_length(http: HttpEngine) -> None:
    for size, status in ((4096, b"200"), (4097, b"413")):
        client = raw(http)
        client.sendall(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        for start in range(0, size, 1000):
            part = padded(size)[start : start + 1000]
            client.sendall(b"%x\r\n%b\r\n" % (len(part), part))
        client.sendall(b"0\r\n\r\n")
        assert client.recv(65536).split()[1] == status
        client.close()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        *(
            (b"GET /health HTTP/1.0\r\n%b\r\n" % (b"x: y\r\n" * n), status)
            for n, status in ((MAX_HEADER_LINES, b"200"), (MAX_HEADER_LINES + 1, b"431"))
        ),
        *(
            (head % (b"y" * (size - taken)), status)
            for head, taken in (
                (b"GET /health HTTP/1.0\r\nx: %b\r\n\r\n", len("/health") + 5),
                (b"GET /health?%b HTTP/1.0\r\n\r\n", len("/health?")),
            )
            for size, status in ((2048, b"200"), (2049, b"431"))
        ),
    ],
    ids=lambda value: str(value)[-12:],
)
def test_heads(http: HttpEngine, head: bytes, status: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_HEADER_BYTES", 2048)
    client = raw(http)
    client.sendall(head)
    assert client.recv(65536).split()[1] == status
    client.close()


def test_choices_and_prompts(http: HttpEngine) -> None:
    assert http.post(COMPLETIONS, **BODY | {"n": 2})[0] == 200
    status, answer = http.post(COMPLETIONS, **BODY | {"n": 3})
    assert (status, answer["error"]["param"]) == (400, "n")
    assert http.post(COMPLETIONS, **BODY | {"prompt": ["a"] * 3})[0] == 200
    status, answer = http.post(COMPLETIONS, **BODY | {"prompt": ["a"] * 4})
    assert (status, answer["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("stop", ["x" * 40] * 64, ["x"] * 65),
        ("stop", "x" * 256, "x" * 257),
        ("stop", ["x"], [""]),
        ("logprobs", 20, 21),
        ("logit_bias", {"0": 100}, {"0": 100.5}),
        ("prompt", [49151], [49152]),
        ("stop_token_ids", [0], [-1]),
        ("stop_token_ids", [49151], [49152]),
        ("allowed_token_ids", [49151], [49152]),
        ("allowed_token_ids", [0], []),
        ("allowed_token_ids", [0] * 1024, [0] * 1025),
        ("logit_bias", {"49151": 1}, {"49152": 1}),
        ("seed", 2**63 - 1, 2**63),
        ("seed", -1, -2),
    ],
)
def test_parameters(http: HttpEngine, name: str, good: object, bad: object) -> None:
    assert http.post(COMPLETIONS, **BODY | {name: good})[0] == 200
    status, answer = http.post(COMPLETIONS, **BODY | {name: bad})
    assert status == 400 and answer["error"]["message"]


def test_alternatives_in_a_chat(http: HttpEngine) -> None:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "logprobs": True}
    assert http.post(CHATS, **body, top_logprobs=20)[0] == 200
    status, answer = http.post(CHATS, **body, top_logprobs=21)
    assert (status, answer["error"]["param"]) == (400, "top_logprobs")


def test_ids_to_detokenize(http: HttpEngine) -> None:
    assert http.post("/detokenize", tokens=[49151])[0] == 200
    status, answer = http.post("/detokenize", tokens=[49152])
    assert (status, answer["error"]["param"]) == (400, "tokens")


def test_biases_are_at_most_1024() -> None:
    with http_engine() as engine, answering(engine, [5]):
        biases = {str(token): 1 for token in range(1024)}
        assert engine.post(COMPLETIONS, **BODY | {"logit_bias": biases})[0] == 200
        assert engine.post(COMPLETIONS, **BODY | {"logit_bias": {**biases, "1024": 1}})[0] == 400


def test_a_full_queue_refuses_at_once_and_takes_more_when_there_is_room(scripted: HttpEngine) -> None:
    connections = [scripted.begin(COMPLETIONS, **BODY) for _ in range(4)]
    requests = [scripted.engine.target.next_submit().request for _ in range(4)]
    status, headers, content = scripted.ask("POST", COMPLETIONS, BODY)
    assert (status, headers["retry-after"]) == (429, "1")
    assert json.loads(content)["error"]["code"] == "overloaded"
    assert scripted.ask("POST", COMPLETIONS, BODY | {"n": 2})[0] == 429
    scripted.engine.target.step(Emission(requests[0], [5], finish_reason="stop"))
    (answered,) = select.select([connection.sock for connection in connections], [], [], PATIENCE_S)[0]
    assert answered.recv(100).startswith(b"HTTP/1.1 200")
    connections.append(scripted.begin(COMPLETIONS, **BODY))
    assert scripted.engine.target.next_submit()
    for opened in connections:
        opened.close()


# -- clients that leave, or do not read -----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_requests(scripted: HttpEngine, stream: bool) -> None:
    connection = scripted.begin(COMPLETIONS, **BODY, n=2, stream=stream)
    requests = [scripted.engine.target.next_submit().request for _ in range(2)]
    scripted.engine.target.step(Emission(requests[0], [5]))
    connection.close()
    for request in requests:
        scripted.engine.target.wait_abort(request)


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_request(scripted: HttpEngine) -> None:
    client = raw(scripted)
    client.sendall(HEAD + b"content-length: 100\r\n\r\n{")
    client.close()
    assert scripted.ask("GET", "/health")[0] == 200
    assert not scripted.engine.target.open


@pytest.mark.parametrize(("tokens", "seconds"), [(200, 3600.0), (32768, 0.3)], ids=["tokens", "seconds"])
def test_a_client_that_reads_nothing_loses_it(tokens: int, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_manager, "MAX_UNREAD", tokens)
    limits = Limits(slow_reader_seconds=seconds)
    with http_engine(ServerConfig(names=("scripted",), port=0, limits=limits)) as engine:
        client = raw(engine)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps(BODY | {"stream": True, "max_tokens": 256}).encode()
        client.sendall(HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body))
        target = engine.engine.target
        request = target.next_submit().request
        deadline = time.monotonic() + PATIENCE_S
        while request not in target.aborted:
            assert time.monotonic() < deadline
            target.step(*[Emission(request, [28120] * 5)] * 20)
            target.pump(5)
        client.close()
        assert engine.ask("GET", "/health")[0] == 200


# -- keys -----------------------------------------------------------------------------------------------------------


def test_every_route_but_health_wants_a_key(tmp_path: Path) -> None:
    server = ServerConfig(names=("scripted",), port=0, api_key_file=key_file(tmp_path, "first", "second"))
    with http_engine(server) as engine, answering(engine, [5]):
        document = json.loads(engine.ask("GET", "/openapi.json", headers={"authorization": "Bearer first"})[2])
        schemes = document["components"]["securitySchemes"]
        assert schemes["header"] == {"type": "apiKey", "in": "header", "name": "X-Api-Key"}
        for path, methods in document["paths"].items():
            for method in methods:
                either = [] if path.startswith("/health") else [{name: []} for name in schemes]
                assert methods[method].get("security", []) == either, path
                status = engine.ask(method.upper(), path)[0]
                assert status == (200 if path.startswith("/health") else 401), path
        assert engine.ask("GET", "/nonesuch")[0] == 401
        for given in ("first", "Bearer", "Bearer ", "Bearer third", "Basic first", "Bearer firstsecond", "Bearer \xff"):
            assert engine.ask("POST", COMPLETIONS, BODY, {"authorization": given})[0] == 401, given
        for given in ("Bearer first", "bearer second"):
            assert engine.ask("POST", COMPLETIONS, BODY, {"authorization": given})[0] == 200
        # What a proxy or a trick makes of the address has no say in it.
        for trick in ("/health/../v1/models", "//health", "/health?x=/v1/models", "/v1/models?/health", "/health%2f"):
            status = engine.ask("GET", trick)[0]
            assert status == 401 or trick.startswith(("/health?", "/health%2f"))  # which is /health/


def test_prompts_are_shared_between_requests_with_one_key_and_one_salt(tmp_path: Path) -> None:
    def salts(keys: tuple[str, ...], *asked: tuple[str, dict[str, str]]) -> list[str]:
        server = ServerConfig(names=("scripted",), port=0, api_key_file=key_file(tmp_path, *keys))
        with http_engine(server) as engine:
            sent = [engine.submitted(COMPLETIONS, {"x-api-key": key}, **BODY, **more) for key, more in asked]
        return [submit.params.cache_salt for submit in sent]

    asked = [("first", {}), ("second", {}), ("first", {"cache_salt": "a"}), ("second", {"cache_salt": "a"})]
    found = salts(("first", "second"), *asked, *asked)
    assert len(set(found)) == 4 and found[:4] == found[4:]
    assert not any(key in salt for salt in found for key in ("first", "second"))
    assert salts(("first",), *asked[::2]) == ["", "a"]


# -- pipelining -------------------------------------------------------------------------------------------------------


def test_pipelined_requests_are_answered_in_order(http: HttpEngine) -> None:
    client = raw(http)
    body = json.dumps(BODY).encode()
    one = HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    client.sendall(one + b"GET /version HTTP/1.0\r\n\r\n")
    answer = until_closed(client)
    assert answer.count(b"HTTP/1.1 200") == 2
    assert answer.index(b"text_completion") < answer.index(b'"version"')
