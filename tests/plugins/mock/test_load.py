"""The load generator: what it reads, what it counts, and that it finds wrong answers."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import tools.load.__main__ as load
from ssd.config.params import SamplingParams
from ssd.frontend.tokenization import Tokenizer
from ssd.launch.supervisor import Engine
from ssd.plugins.mock.oracle import Answer
from tests.faults.engine import running_engine
from tests.scripted_engine import MODEL
from tools.load.checking import Checker, Request
from tools.load.driver import Driver, Tally
from tools.load.http import Http, ResponseReader
from tools.load.report import figures
from tools.load.zeromq import ZeroMQ

VOCAB, CONTEXT = 49152, 2048
TOKENIZER = Tokenizer(MODEL)


@pytest.fixture
def checker() -> Checker:
    return Checker(TOKENIZER, VOCAB, CONTEXT)


class Heard(list[Any]):
    """A sink that writes down what it is told."""

    def piece(self, name: int, ids: list[int], text: str) -> None:
        self.append((name, ids, text))

    def end(self, name: int, reason: str, text: str) -> None:
        self.append((name, reason, text))

    def fail(self, name: int, code: str) -> None:
        self.append((name, code))


def choice(ids: list[int], text: str, reason: str | None = None) -> dict[str, Any]:
    choices = [{"index": 0, "text": text, "token_ids": ids, "finish_reason": reason, "logprobs": None}]
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": choices}


def streamed(*events: dict[str, Any]) -> bytes:
    """A chunked response of server-sent events, with a comment line as keep-alives are."""
    parts = [b": ping\n\n", *(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)]
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [*parts, b"data: [DONE]\n\n"])
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + body + b"0\r\n\r\n"


def plain(status: str, document: Any, more: str = "") -> bytes:
    body = json.dumps(document).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


def error(code: str | int | None, kind: str = "server_error") -> dict[str, Any]:
    return {"error": {"message": "no", "type": kind, "param": None, "code": code}}


# -- HTTP -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 50, 100_000])
@pytest.mark.parametrize(
    ("response", "heard"),
    [
        (
            streamed(choice([1, 2], "é"), choice([3], "", "length"), {"choices": [], "usage": {}}),
            [(5, [1, 2], "é"), (5, [3], ""), (5, "length", "")],
        ),
        (plain("200 OK", choice([1, 2], "ab", "stop")), [(5, [1, 2], "ab"), (5, "stop", "")]),
        (plain("429 Too Many Requests", error("overloaded")), [(5, "overloaded")]),
        (plain("503 Service Unavailable", {}), [(5, "overloaded")]),
        (plain("400 Bad Request", error(None, "invalid_request_error")), [(5, "invalid_request_error")]),
        (plain("404 Not Found", error(404)), [(5, "404")]),
        (plain("502 Bad Gateway", {}), [(5, "status 502")]),
        (streamed(choice([1], "a"), error("engine_error")), [(5, [1], "a"), (5, "engine_error")]),
        (streamed(choice([1], "a")), [(5, [1], "a"), (5, "status 200")]),
    ],
)
def test_responses_are_read_however_they_are_cut(response: bytes, heard: list[Any], size: int) -> None:
    reader, sink = ResponseReader(), Heard()
    for _ in range(2):  # one after the other on a kept connection
        reader.begin(5)
        for start in range(0, len(response), size):
            assert not reader.ended
            reader.feed(response[start : start + size], sink)
        assert reader.ended and reader.keep_alive
    assert sink == heard * 2


def test_a_connection_that_the_server_will_close_is_not_kept() -> None:
    reader = ResponseReader()
    reader.begin(1)
    reader.feed(plain("200 OK", choice([1], "a", "stop"), "Connection: close\r\n"), Heard())
    assert reader.ended and not reader.keep_alive


@pytest.mark.parametrize("data", [b"SSH-2.0\r\n", plain("200 OK", {"choices": 3}), plain("200 OK", [])])
def test_what_is_no_response_is_told(data: bytes) -> None:
    reader = ResponseReader()
    reader.begin(1)
    with pytest.raises(ValueError, match="not a response"):
        reader.feed(data, Heard())


class _Server(socketserver.ThreadingTCPServer):
    """Answers completions as the oracle would; the third request of each connection in vain."""

    daemon_threads = True
    allow_reuse_address = True


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        for count in range(3):
            asked = self._request()
            if asked is None or count == 2:
                return
            params = SamplingParams(seed=asked["seed"], max_tokens=asked["max_tokens"], ignore_eos=True)
            ids, reason = Answer(asked["prompt"], params, VOCAB, CONTEXT).whole()
            whole = choice(ids, TOKENIZER.decode(ids), reason)
            self.wfile.write(streamed(whole) if asked["stream"] else plain("200 OK", whole))

    def _request(self) -> Any:
        length = 0
        while (line := self.rfile.readline()) != b"\r\n":
            if not line:
                return None
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        return json.loads(self.rfile.read(length))


@contextmanager
def server() -> Iterator[str]:
    with _Server(("127.0.0.1", 0), _Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_address[1]}"
        finally:
            running.shutdown()
            thread.join()


@pytest.mark.parametrize("stream", [True, False])
def test_http_keeps_connections_and_counts_broken_ones(checker: Checker, stream: bool) -> None:
    with server() as url:
        transport = Http(url, "m", 8, stream)
        tally = Driver(transport, checker, 4, 6).keep_open(4, 0.3)
        transport.close()
    assert tally.most_open == 4
    assert set(tally.errors) <= {"disconnected", "lost"} and tally.errors["lost"] == 0
    answered = tally.right + tally.right_later
    assert answered > 8
    assert abs(answered - 2 * tally.errors["disconnected"]) <= 8, "two of three on each connection"


def test_http_without_a_server_sends_nothing(checker: Checker) -> None:
    with server() as url:
        pass
    tally = Driver(Http(url, "m", 8), checker, 4, 6).keep_open(2, 0.05)
    assert (tally.sent, tally.right) == (0, 0)
    assert tally.unsent > 0


# -- ZeroMQ, with the mock ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running_engine(load_format="mock", max_num_seqs=64) as engine:
        yield engine


def test_answers_are_counted_and_right(engine: Engine, checker: Checker) -> None:
    transport = ZeroMQ(engine.address, 3)
    driver = Driver(transport, checker, 4, 20)
    tally = driver.keep_open(50, 0.4)
    assert tally.sent == tally.right + tally.right_later == len(tally.whole_s)
    assert (tally.most_open, tally.unsent, tally.refused, sum(tally.errors.values())) == (50, 0, 0, 0)
    assert 0 < tally.tokens <= 20 * tally.sent
    assert all(0 < first <= end for first, end in zip(tally.first_token_s, tally.whole_s, strict=True))
    tally = driver.arrive(200.0, 0.5)
    assert 50 < tally.sent <= 100
    assert (tally.right, tally.right_later) == (tally.sent, 0), "what ends after the last arrival counts too"
    assert tally.tokens == 20 * tally.sent
    transport.close()


def test_wrong_answers_are_found(engine: Engine, checker: Checker) -> None:
    class Confused(Checker):
        def right(self, request: Request, reason: str) -> bool:
            request.params = SamplingParams(seed=request.name + 1, max_tokens=request.params.max_tokens)
            return super().right(request, reason)

    transport = ZeroMQ(engine.address, 1)
    tally = Driver(transport, Confused(TOKENIZER, VOCAB, CONTEXT), 4, 5).keep_open(4, 0.1)
    transport.close()
    assert tally.right == 0
    assert tally.errors["wrong"] == tally.sent > 0


@pytest.mark.parametrize("broken", ["ids", "text", "reason", "short"])
def test_every_part_of_an_answer_is_checked(checker: Checker, broken: str) -> None:
    request = checker.request(4, 9)
    ids, reason = Answer(request.prompt, request.params, VOCAB, CONTEXT).whole()
    request.ids, request.texts = list(ids), [TOKENIZER.decode(ids)]
    assert checker.right(request, reason)
    if broken == "ids":
        request.ids[3] += 1
    elif broken == "text":
        request.texts.append("!")
    elif broken == "short":
        request.ids.pop()
    assert not checker.right(request, "stop" if broken == "reason" else reason)


def test_refusals_are_no_errors(checker: Checker) -> None:
    class Full:
        def send(self, request: Request) -> bool:
            self.name = request.name
            return True

        def receive(self, timeout_s: float, sink: Any) -> None:
            sink.fail(self.name, "overloaded")

        def close(self) -> None: ...

    tally = Driver(Full(), checker, 4, 5).keep_open(1, 0.02)
    assert tally.refused == tally.sent == len(tally.refusal_s) > 0
    assert not +tally.errors


def test_figures_have_percentiles_and_what_is_left_of_the_peak() -> None:
    tally = Tally(1.0, 2.0, sent=300, right=100, right_later=5, refused=190, tokens=400, most_open=7)
    tally.errors["wrong"] = 5
    tally.whole_s = [n / 1000 for n in range(1, 102)]
    row = figures("short x 10", tally, peak=100.0)
    assert (row["completed"], row["failed"], row["errors"], row["refused"]) == (105, 5, {"wrong": 5}, 190)
    assert (row["request_throughput"], row["output_throughput"]) == (50.0, 200.0)
    assert (row["p50_e2el_ms"], row["p95_e2el_ms"], row["p99_e2el_ms"]) == pytest.approx((51.0, 96.0, 100.0))
    assert (row["request_goodput_over_peak"], row["request_rate"]) == (0.5, 300.0)
    assert "request_goodput_over_peak" not in figures("short", tally)


def test_the_command_measures_an_engine_of_its_own_and_writes_json(tmp_path: Path) -> None:
    out = tmp_path / "load.json"
    arguments = ["short", "--seconds", "0.3", "--overload", "3", "--json", str(out)]
    result = CliRunner().invoke(load.main, arguments)
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["loads"]
    assert [row["load"] for row in rows] == ["short", "short x 3"]
    assert rows[0]["request_throughput"] > 0 and rows[1]["request_goodput_over_peak"] > 0
    assert "short x 3" in result.output


def test_the_command_fails_where_nothing_answers() -> None:
    with server() as url:
        pass
    result = CliRunner().invoke(load.main, ["short", "--seconds", "0.05", "--url", url])
    assert result.exit_code == 1
    assert "0 right answers" in result.output
