"""Every limit of the HTTP interface at its border, and what a hostile client may try."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

import pytest

from ssd.config.engine import Limits, ServerConfig
from ssd.ipc.messages import Emission, Submit
from tests.frontend.http_engine import HttpEngine, answering, http_engine
from tests.scripted_engine import PATIENCE_S

LIMITS = Limits(
    max_open_requests=4,
    max_n=2,
    max_prompts=3,
    max_body_bytes=4096,
    max_header_bytes=2048,
    max_header_lines=20,
    slow_reader_tokens=200,
    slow_reader_seconds=0.5,
)
SERVER = ServerConfig(names=("scripted",), port=0, limits=LIMITS)
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
    assert http.ask("POST", "/v1/completions", padded(4096))[0] == 200
    assert http.ask("POST", "/v1/completions", padded(4097))[0] == 413


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


def test_header_lines(http: HttpEngine) -> None:
    def ask(lines: int) -> bytes:
        client = raw(http)
        client.sendall(b"GET /health HTTP/1.0\r\n" + b"".join(b"x-%d: y\r\n" % n for n in range(lines)) + b"\r\n")
        answer = client.recv(65536)
        client.close()
        return answer.split()[1]

    assert ask(20) == b"200"
    assert ask(21) == b"431"


def test_header_bytes(http: HttpEngine) -> None:
    def ask(size: int) -> bytes:
        client = raw(http)
        client.sendall(b"GET /health HTTP/1.0\r\nx: %b\r\n\r\n" % (b"y" * (size - len("/health") - 5)))
        answer = client.recv(65536)
        client.close()
        return answer.split()[1]

    assert ask(2048) == b"200"
    assert ask(2049) == b"431"


def test_a_head_without_end_is_cut_off(http: HttpEngine) -> None:
    client = raw(http)
    client.sendall(b"GET /health HTTP/1.1\r\nx: ")
    sent = 0
    try:
        for _ in range(300):
            client.sendall(b"y" * 2**20)
            sent += 2**20
    except (BrokenPipeError, ConnectionResetError):
        pass
    assert sent < 300 * 2**20
    assert http.ask("GET", "/health")[0] == 200


def test_choices_and_prompts(http: HttpEngine) -> None:
    assert http.post("/v1/completions", **BODY | {"n": 2})[0] == 200
    status, answer = http.post("/v1/completions", **BODY | {"n": 3})
    assert (status, answer["error"]["param"]) == (400, "n")
    assert http.post("/v1/completions", **BODY | {"prompt": ["a"] * 3})[0] == 200
    status, answer = http.post("/v1/completions", **BODY | {"prompt": ["a"] * 4})
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
    assert http.post("/v1/completions", **BODY | {name: good})[0] == 200
    status, answer = http.post("/v1/completions", **BODY | {name: bad})
    assert status == 400 and answer["error"]["message"]


def test_alternatives_in_a_chat(http: HttpEngine) -> None:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "logprobs": True}
    assert http.post("/v1/chat/completions", **body, top_logprobs=20)[0] == 200
    status, answer = http.post("/v1/chat/completions", **body, top_logprobs=21)
    assert (status, answer["error"]["param"]) == (400, "top_logprobs")


def test_ids_to_detokenize(http: HttpEngine) -> None:
    assert http.post("/detokenize", tokens=[49151])[0] == 200
    status, answer = http.post("/detokenize", tokens=[49152])
    assert (status, answer["error"]["param"]) == (400, "tokens")


def test_biases_are_at_most_1024() -> None:
    with http_engine() as engine, answering(engine, [5]):
        biases = {str(token): 1 for token in range(1024)}
        assert engine.post("/v1/completions", **BODY | {"logit_bias": biases})[0] == 200
        assert engine.post("/v1/completions", **BODY | {"logit_bias": {**biases, "1024": 1}})[0] == 400


def test_a_full_queue_refuses_at_once_and_takes_more_when_there_is_room(scripted: HttpEngine) -> None:
    connections = [scripted.connection() for _ in range(4)]
    requests = []
    for connection in connections:
        connection.request("POST", "/v1/completions", json.dumps(BODY), {"content-type": "application/json"})
        requests.append(scripted.engine.target.next_submit().request)
    status, headers, content = scripted.ask("POST", "/v1/completions", BODY)
    assert (status, headers["retry-after"]) == (429, "1")
    assert json.loads(content)["error"]["code"] == "overloaded"
    assert scripted.ask("POST", "/v1/completions", BODY | {"n": 2})[0] == 429
    scripted.engine.target.step(Emission(requests[0], [5], finish_reason="stop"))
    assert connections[0].getresponse().status == 200
    connections[0].request("POST", "/v1/completions", json.dumps(BODY), {"content-type": "application/json"})
    assert scripted.engine.target.next_submit()
    for connection in connections:
        connection.close()


# -- clients that leave, or do not read -----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_requests(scripted: HttpEngine, stream: bool) -> None:
    connection = scripted.connection()
    body = BODY | {"n": 2, "stream": stream}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
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


@pytest.mark.parametrize(
    "limits",
    [
        Limits(slow_reader_tokens=200, slow_reader_seconds=3600),
        Limits(slow_reader_tokens=32768, slow_reader_seconds=0.3),
    ],
    ids=["tokens", "seconds"],
)
def test_a_client_that_does_not_read_its_stream_loses_it(limits: Limits) -> None:
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
    file = tmp_path / "keys"
    file.write_text("first\nsecond\n")
    file.chmod(0o600)
    with (
        http_engine(ServerConfig(names=("scripted",), port=0, api_key_file=str(file))) as engine,
        answering(engine, [5]),
    ):
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
            assert engine.ask("POST", "/v1/completions", BODY, {"authorization": given})[0] == 401, given
        for given in ("Bearer first", "bearer second"):
            assert engine.ask("POST", "/v1/completions", BODY, {"authorization": given})[0] == 200
        # What a proxy or a trick makes of the address has no say in it.
        for trick in ("/health/../v1/models", "//health", "/health?x=/v1/models", "/v1/models?/health", "/health%2f"):
            status = engine.ask("GET", trick)[0]
            assert status == 401 or trick.startswith(("/health?", "/health%2f"))  # which is /health/


def submitted(engine: HttpEngine, key: str, **body: object) -> Submit:
    """What the target is told of a request with a key."""
    connection = engine.connection()
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    connection.request("POST", "/v1/completions", json.dumps({"model": "scripted", "prompt": "a", **body}), headers)
    submit = engine.engine.target.next_submit()
    connection.close()
    return submit


def test_prompts_are_shared_between_requests_with_one_key_and_one_salt(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first\nsecond\n")
    file.chmod(0o600)
    asked = [("first", {}), ("second", {}), ("first", {"cache_salt": "a"}), ("second", {"cache_salt": "a"})]
    with http_engine(ServerConfig(names=("scripted",), port=0, api_key_file=str(file))) as engine:
        salts = [submitted(engine, key, **body).params.cache_salt for key, body in asked]
        again = [submitted(engine, key, **body).params.cache_salt for key, body in asked]
        assert len(set(salts)) == 4 and again == salts
        assert not any(key in salt for salt in salts for key in ("first", "second"))
    file.write_text("first\n")
    with http_engine(ServerConfig(names=("scripted",), port=0, api_key_file=str(file))) as engine:
        assert [submitted(engine, "first", **body).params.cache_salt for _, body in asked] == ["", "", "a", "a"]


# -- nonsense -------------------------------------------------------------------------------------------------------


def test_nonsense_is_refused_and_the_connection_ends(http: HttpEngine) -> None:
    for garbage in (b"\x16\x03\x01\x02\x00", b"SSH-2.0-x\r\n", b"GET\r\n\r\n", b"\0" * 1000, b"GET / HTTP/9.9\r\n\r\n"):
        client = raw(http)
        client.sendall(garbage)
        answer = until_closed(client)
        assert answer.startswith(b"HTTP/1.1 400") and b'"error"' in answer, garbage
        client.close()
    assert http.ask("GET", "/health")[0] == 200


def test_pipelined_requests_are_answered_in_order(http: HttpEngine) -> None:
    client = raw(http)
    body = json.dumps(BODY).encode()
    one = HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    client.sendall(one + b"GET /version HTTP/1.0\r\n\r\n")
    answer = until_closed(client)
    assert answer.count(b"HTTP/1.1 200") == 2
    assert answer.index(b"text_completion") < answer.index(b'"version"')
