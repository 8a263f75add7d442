"""Attacks on the parser of HTTP: heads and messages that are wrong, or right and rare."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.attacks.http_client import CHAT, COMPLETIONS, TOKENIZE, at_once, connect, exchange, head, post, read, request
from tests.attacks.registry import Answer, Site, attack

_QUESTION = {"prompt": [1, 2], "max_tokens": 2}


def question(site: Site, **fields: object) -> dict[str, object]:
    return {"model": site.model, **_QUESTION, **fields}


@attack()
def connect_method(site: Site) -> Iterator[Answer]:
    """CONNECT, whose address is no path."""
    for target in ("a:1", "127.0.0.1:22", "[::1]:80", "a"):
        yield from exchange(site, head(site, target, 0, method="CONNECT"))


@attack("200")
def bad_addresses(site: Site) -> Iterator[Answer]:
    """Addresses that are no URL, or no path."""
    absolute = ("http://[::1", "http://[", "http://a:b/", "http://", "//", "///", "*", "?", "/%", "/%zz", "/%00", "/..")
    for address in (*absolute, "/" + "a/" * 8000, "/v1/models/" + "%2f" * 5000, "/health#x", "/\x7f", "/\xff"):
        yield from exchange(site, head(site, address, 0, method="GET"))


@attack("200")
def garbage_after_a_request(site: Site) -> Iterator[Answer]:
    """A good request and garbage in one segment: the request has its answer, the garbage its refusal."""
    for garbage in (b"\x00\x01\x02", b"garbage\r\n\r\n", b"GET\r\n\r\n", b"\r\n\r\n\r\n\xff\xff\r\n\r\n"):
        first, second = exchange(site, request(site, COMPLETIONS, question(site)) + garbage, answers=2)
        assert first.code == "200", f"a good request before {garbage!r} got {first}"
        yield second


@attack("200")
def pipelined_body_behind_a_stream(site: Site) -> Iterator[Answer]:
    """A request with a body that waits for a long stream must not cut it."""
    long = request(site, COMPLETIONS, question(site, stream=True, max_tokens=200, ignore_eos=True))
    with connect(site) as client:
        client.sendall(long + request(site, COMPLETIONS, question(site, user="x" * 500)))
        first, second = read(client, 2)
        assert first.code == "200" and first.reason.endswith("data: [DONE]\n\n"), f"the stream was cut: {first}"
        yield second


@attack("200")
def half_closed(site: Site) -> Iterator[Answer]:
    """A client that says all and closes its side, as `nc -N` does, still wants its answer."""
    yield from exchange(site, request(site, COMPLETIONS, question(site)), half_closed=True)
    yield from exchange(site, head(site, "/health", 0, method="GET"), half_closed=True)


@attack("200")
def upgrade_with_a_body(site: Site) -> Iterator[Answer]:
    """What Java's default client and `curl --http2` send: the body counts, the upgrade does not."""
    for protocol in ("h2c", "websocket", "TLS/1.0"):
        raw = request(site, COMPLETIONS, question(site), upgrade=protocol, connection="Upgrade, HTTP2-Settings")
        (answer,) = exchange(site, raw)
        assert answer.code == "200", f"upgrade to {protocol}: {answer}"
        yield answer


@attack()
def wrong_host(site: Site) -> Iterator[Answer]:
    """Names that a web page may have given to this machine (DNS rebinding), and no name."""
    for prefix in ("", "localhost.", "127.0.0.1."):
        yield post(site, COMPLETIONS, question(site), host=f"{prefix}evil.example")
    for host in ("evil.example:80", "169.254.169.254", ""):
        yield post(site, COMPLETIONS, question(site), host=host)


@attack()
def no_content_type(site: Site) -> Iterator[Answer]:
    """What a form of a web page can send without asking first."""
    for kind in ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "image/png"):
        for path in (COMPLETIONS, CHAT, TOKENIZE):
            yield post(site, path, question(site), content_type=kind, origin="https://evil.example")


@attack("200")
def methods(site: Site) -> Iterator[Answer]:
    """Methods that a path does not have, or that nobody has."""
    for method in ("PUT", "DELETE", "PATCH", "TRACE", "PROPFIND", "get", "X" * 5000, "GET\tGET", "OPTIONS", "M-SEARCH"):
        yield from exchange(site, request(site, COMPLETIONS, question(site), method=method))


@attack("200")
def other_protocols(site: Site) -> Iterator[Answer]:
    """The first bytes of TLS, HTTP/2, SSH, ZeroMQ and others."""
    starts = (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(512),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"SSH-2.0-x\r\n\r\n",
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + bytes(48),
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"\x00" * 4096,
    )
    for start in starts:
        yield from exchange(site, start, half_closed=True)


@attack()
def smuggling(site: Site) -> Iterator[Answer]:
    """Messages whose length two parsers may see differently."""
    pairs = (
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 5\r\n",
        b"content-length: 5\r\ncontent-length: 6\r\n",
        b"content-length: +5\r\n",
        b"content-length: 0x5\r\n",
        b"content-length: 5, 5\r\n",
        b"content-length: -1\r\n",
        b"content-length: 99999999999999999999\r\n",
        b"transfer-encoding: chunked, identity\r\n",
        b"transfer-encoding: xchunked\r\n",
        b"transfer-encoding : chunked\r\n",
        b"content-length: 5\r\n x: y\r\n",
    )
    start = head(site, COMPLETIONS, 0, content_length="")[:-2]
    for fields in pairs:
        yield from exchange(site, start + fields + b"\r\n" + b"0\r\n\r\nGET /x HTTP/1.1\r\n\r\n", half_closed=True)


@attack()
def chunks_that_cannot_be(site: Site) -> Iterator[Answer]:
    """Chunk sizes out of all bounds, extensions without end, a chunk that is longer than it says."""
    start = head(site, COMPLETIONS, 0, content_length="", transfer_encoding="chunked")
    for body in (b"ffffffffffffffff\r\n", b"fffffffffffffffff\r\n", b"-1\r\n", b"g\r\n", b"2\r\n{}}\r\n0\r\n\r\n"):
        yield from exchange(site, start + body, half_closed=True)
    yield from exchange(site, start + b"2;x=" + b"y" * 200_000 + b"\r\n{}\r\n0\r\n\r\n")


@attack()
def heads_without_end(site: Site) -> Iterator[Answer]:
    """Too many lines, too long ones, and trailers."""
    for fields in (b"x: y\r\n" * 5000, b"x: " + b"y" * 300_000 + b"\r\n", b"x" * 300_000 + b": y\r\n"):
        yield from exchange(site, b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n" + fields + b"\r\n")
    start = head(site, COMPLETIONS, 0, content_length="", transfer_encoding="chunked")
    yield from exchange(site, start + b"2\r\n{}\r\n0\r\n" + b"x: y\r\n" * 50_000 + b"\r\n")


@attack("200", "404")
def odd_fields(site: Site) -> Iterator[Answer]:
    """Header fields with control characters, other alphabets, and nothing."""
    for value in ("\x01", "\xff\xfe", "a\x00b", "\t", " " * 3000, "é" * 500):
        yield from exchange(site, head(site, "/health", 0, method="GET", x_request_id=value))


@attack("200", "none")
def random_bytes(site: Site) -> Iterator[Answer]:
    """Bytes, and good requests with some bytes changed. A connection may be closed where nothing was asked."""
    dice = random.Random(1)
    good = request(site, COMPLETIONS, question(site))

    def changed() -> bytes:
        raw = bytearray(good)
        for _ in range(dice.randint(1, 8)):
            raw[dice.randrange(len(raw))] = dice.randrange(256)
        return bytes(raw)

    sent = [dice.randbytes(dice.randint(1, 400)) for _ in range(100)] + [changed() for _ in range(200)]
    for raw in sent:
        yield exchange(site, raw, half_closed=True)[0]


@attack()
def wrong_keys(site: Site) -> Iterator[Answer]:
    """Every address with keys that are none, where the engine wants one; without keys only what is not there."""
    paths = ("/v1/models", "/metrics", "/version", "/server_info", "/openapi.json", "/x", "/v1/models/x")
    keys = ("Bearer x", "Bearer ", "Basic eDp5", "Bearer " + "x" * 20_000, "bearer \xff", site.api_key or "Bearer")
    for path in paths if site.api_key else ("/x", "/v1/models/x"):
        for key in keys:
            yield from exchange(site, head(site, path, 0, method="GET", authorization=key))


@attack("200")
def expectations(site: Site) -> Iterator[Answer]:
    """Clients that wait for 100, ask for an encoding, or for a range."""
    yield post(site, COMPLETIONS, question(site), expect="100-continue")
    yield post(site, COMPLETIONS, question(site), range="bytes=0-10", accept_encoding="gzip;q=1000000")
    packed = bytes.fromhex("1f8b0800000000000003") + b"\x00" * 5000
    for encoding in ("gzip", "br", "gzip, gzip, gzip"):
        yield post(site, COMPLETIONS, packed, content_encoding=encoding)


@attack("200")
def many_requests_at_once(site: Site) -> Iterator[Answer]:
    """More requests side by side than may run."""
    yield from at_once([lambda: post(site, COMPLETIONS, question(site))] * 500)


@attack("200")
def deep_pipeline(site: Site) -> Iterator[Answer]:
    """Forty requests in one segment."""
    yield from exchange(site, request(site, COMPLETIONS, question(site)) * 40, answers=40)
