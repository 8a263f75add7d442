"""Attacks over ZeroMQ: frames and messages that are none, floods, and clients that do not read or shake hands."""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ssd.client import Client
from ssd.config.params import SamplingParams
from ssd.errors import EngineDeadError, UsageError
from ssd.ipc import keys, sockets
from ssd.ipc.public import FRONTEND_TO_CLIENT, Cancel, Chunk, Describe, Description, Failed, Generate, Message, pack
from tests.attacks.registry import PATIENCE_S, Answer, Site, attack
from tests.mock import oracle

_FLOOD_S = 3.0
_MULTIPART_BYTES = 512 * 2**20
_IDLE = 1500
_LOOKS, _LOOK_S = 5, 0.2


class Peer:
    """A client that says what an attack wants."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.SNDTIMEO, int(1000 * PATIENCE_S))
        self.socket.connect(address)

    def send(self, *messages: Generate | Cancel | Describe) -> None:
        for message in messages:
            self.socket.send_multipart(pack(message))

    def answers(self, count: int, patience: float = PATIENCE_S) -> Iterator[Answer]:
        """The ends of so many requests."""
        while count:
            assert self.socket.poll(int(1000 * patience)), f"{count} requests have no end"
            received = sockets.receive(self.socket, FRONTEND_TO_CLIENT)
            assert received is not None
            message = received[2]
            if isinstance(message, Chunk):
                continue
            count -= 1
            if isinstance(message, Failed):
                yield Answer(message.code, message.message)
            else:
                yield Answer("described" if isinstance(message, Description) else message.finish_reason, "")

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def peer(site: Site) -> Iterator[Peer]:
    client = Peer(site.address)
    try:
        yield client
    finally:
        client.close()


def described(site: Site) -> Iterator[Answer]:
    """A new client is served."""
    with peer(site) as client:
        client.send(Describe())
        yield from client.answers(1)


def short(name: int, prompt: str | None = None, **params: Any) -> Generate:
    ids = [1, 2] if prompt is None else None
    return Generate(name, prompt, ids, params=SamplingParams(**{"max_tokens": 2, **params}))


def path(address: str) -> str:
    return address.removeprefix("ipc://")


@attack("described")
def wrong_frames(site: Site) -> Iterator[Answer]:
    """Frames of any number, length and content."""
    dice = random.Random(4)
    with peer(site) as client:
        for _ in range(3000):
            client.socket.send_multipart([dice.randbytes(dice.randint(0, 300)) for _ in range(dice.randint(1, 6))])
        header = pack(Describe())[0]
        for body in (b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 200_000, b"\x80"):
            client.socket.send_multipart([header, body])
        client.socket.send_multipart([header])
        client.socket.send_multipart([b""] * 1000)
        client.send(Describe())
        yield from client.answers(1)


@attack("described")
def pickles(site: Site) -> Iterator[Answer]:
    """Code in place of a message."""
    with peer(site) as client:
        for code in (b"cos\nsystem\n(S'touch PWNED'\ntR.", b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00\x8c\x02os."):
            client.socket.send_multipart([pack(Describe())[0], code])
            client.socket.send_multipart([code, code])
        client.send(Describe())
        yield from client.answers(1)


@attack("described")
def mutated_messages(site: Site) -> Iterator[Answer]:
    """Good messages with some bytes changed, cut off or twice."""
    dice = random.Random(5)
    with peer(site) as client:
        for name in range(2000):
            header, body = pack(short(name))
            raw = bytearray(body)
            for _ in range(dice.randint(1, 4)):
                raw[dice.randrange(len(raw))] = dice.randrange(256)
            client.socket.send_multipart([header, bytes(raw[: dice.choice((len(raw), dice.randrange(len(raw))))])])
    yield from described(site)


@attack("stop", "length", "abort")
def hostile_parameters(site: Site) -> Iterator[Answer]:
    """Parameters at and beyond their bounds, which a client that checks nothing sends."""
    wrong: list[dict[str, Any]] = [
        {"max_tokens": 2**31 - 1},
        {"min_tokens": 2**31 - 1},
        {"stop_token_ids": (2**31 - 1,)},
        {"logit_bias": {2**31 - 1: 1.0}},
        {"temperature": 100.0},
        {"seed": 2**63 - 1},
        {"stop": ("\x00", "a" * 256)},
        {"logprobs": 20, "prompt_logprobs": 20},
        {"repetition_penalty": 1e-300},
    ]
    with peer(site) as client:
        for name, params in enumerate(wrong):
            client.send(short(name, **({"max_tokens": 4} | params)), Cancel(name))
        client.send(Generate(100, None, [2**31 - 1]), Generate(101), Generate(102, "a", [1]), Generate(103, ""))
        yield from client.answers(len(wrong) + 4)
        client.socket.send_multipart(pack(short(200, temperature=float("nan"))))
        client.socket.send_multipart(pack(short(200, max_tokens=-1)))
        client.send(short(200))
        yield from client.answers(1)


@attack("described")
def endless_multipart(site: Site) -> Iterator[Answer]:
    """A message of frames without end: each says that more follow. Who is cut off comes again."""
    part = bytes(60_000)
    flood(site, b"\x03" + struct.pack(">Q", len(part)) + part)  # more, long
    yield from described(site)


@attack("described")
def endless_small_frames(site: Site) -> Iterator[Answer]:
    """The same with empty frames, which cost more than they weigh."""
    flood(site, b"\x01\x00" * 50_000)
    yield from described(site)


def flood(site: Site, frames: bytes) -> None:
    """Send the same again and again for some seconds."""
    until, sent = time.monotonic() + _FLOOD_S, 0
    while time.monotonic() < until and sent < _MULTIPART_BYTES:
        with suppress(OSError), zmtp(site.address) as client:
            while time.monotonic() < until and sent < _MULTIPART_BYTES:
                client.sendall(frames)
                sent += len(frames)


def connected(address: str) -> socket.socket:
    if address.startswith("tcp://"):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        return socket.create_connection((host, int(port)), PATIENCE_S)
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(PATIENCE_S)
    client.connect(path(address))
    return client


def zmtp(address: str) -> socket.socket:
    """A connection over which a DEALER has shaken hands."""
    client = connected(address)
    client.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    client.sendall(b"\x04" + bytes([len(ready)]) + ready)
    assert client.recv(4096), "the engine does not shake hands"
    return client


def wire(message: Message) -> bytes:
    """A message as a peer without keys sends it."""
    header, body = pack(message)
    return bytes([1, len(header)]) + header + struct.pack(">BQ", 2, len(body)) + body


@attack("described")
def lengths_that_are_not_there(site: Site) -> Iterator[Answer]:
    """Frames and commands that announce as much as can be said."""
    for flags in (b"\x02", b"\x03", b"\x06"):
        for length in (2**62, 2**63, 2**64 - 1, 2**31, 5 * 2**20):
            with zmtp(site.address) as client:
                client.sendall(flags + struct.pack(">Q", length) + bytes(1000))
    yield from described(site)


@attack("described")
def halves_of_handshakes(site: Site) -> Iterator[Answer]:
    """Peers that stop anywhere in a greeting, or greet with garbage."""
    dice = random.Random(6)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    for size in range(0, 64, 3):
        for rest in (b"", dice.randbytes(100)):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(path(site.address))
                client.sendall(greeting[:size] + rest)
    yield from described(site)


@attack("described")
def flood_of_questions_without_reading(site: Site) -> Iterator[Answer]:
    """A client that asks as fast as it can and reads nothing."""
    frames = pack(Describe())
    with peer(site) as client:
        until = time.monotonic() + _FLOOD_S
        client.socket.setsockopt(zmq.SNDTIMEO, 200)
        while time.monotonic() < until:
            try:
                client.socket.send_multipart(frames)
            except zmq.Again:
                continue
        yield from described(site)


@attack("described")
def flood_of_large_messages_without_reading(site: Site) -> Iterator[Answer]:
    """Four peers that send texts of a megabyte and read nothing."""
    text = "x" * 2**20
    with ExitStack() as stack:
        clients = [stack.enter_context(peer(site)) for _ in range(4)]
        until = time.monotonic() + _FLOOD_S
        name = 0
        while time.monotonic() < until:
            for client in clients:
                name += 1
                try:
                    client.socket.send_multipart(pack(short(name, text)), flags=zmq.NOBLOCK)
                except zmq.Again:
                    time.sleep(0.005)
        yield from described(site)


@attack("length", "stop")
def flood_with_reading(site: Site) -> Iterator[Answer]:
    """More requests than may be open, from a client that takes every answer."""
    with peer(site) as client:
        for start in range(0, 5000, 500):
            client.send(*(short(start + n) for n in range(500)))
            yield from client.answers(500)


@attack("length", "stop", "abort")
def cancel_storm(site: Site) -> Iterator[Answer]:
    """Cancels of what is not there, and of everything that was just begun."""
    with peer(site) as client:
        client.send(*(Cancel(name) for name in range(10_000)))
        for start in range(0, 1000, 100):
            for name in range(start, start + 100):
                client.send(short(name, max_tokens=1000, ignore_eos=True), Cancel(name), Cancel(name))
            yield from client.answers(100)


@attack("length", "stop", "abort")
def one_name_again_and_again(site: Site) -> Iterator[Answer]:
    """Requests under the name of one that is open."""
    with peer(site) as client:
        client.send(*(short(7, max_tokens=200, ignore_eos=True) for _ in range(200)), Cancel(7))
        yield from client.answers(200)


@attack("described")
def peers_that_come_and_go(site: Site) -> Iterator[Answer]:
    """Clients that leave with requests open."""
    for _ in range(60):
        with peer(site) as client:
            client.send(*(short(name, max_tokens=4000, ignore_eos=True) for name in range(8)), Describe())
            client.socket.poll(100)
    yield from described(site)


@attack("described")
def one_identity_for_all(site: Site) -> Iterator[Answer]:
    """Peers that take each other's routing id."""
    context: zmq.Context[Any] = zmq.Context()
    for _ in range(50):
        for identity in (b"a", b"frontend", b"x" * 255):
            client = context.socket(zmq.DEALER)
            client.linger = 0
            client.setsockopt(zmq.IDENTITY, identity)
            client.connect(site.address)
            client.send_multipart(pack(Describe()))
    yield from described(site)
    context.destroy(linger=0)


@attack("described")
def idle_peers(site: Site) -> Iterator[Answer]:
    """More connections over TCP than there are descriptors, while another client comes over the ipc socket."""
    host, _, port = site.tcp.removeprefix("tcp://").rpartition(":")
    with ExitStack() as stack:
        for _ in range(_IDLE if site.tcp else 0):
            try:
                stack.enter_context(socket.create_connection((host, int(port)), 0.5))
            except OSError:
                break
            time.sleep(0.001)  # faster than they are accepted, they would be dropped
        for _ in range(_LOOKS):
            yield from described(site)
            time.sleep(_LOOK_S)
    yield from described(site)


@attack("described")
def wrong_curve_keys(site: Site) -> Iterator[Answer]:
    """Clients without a key, with one that nobody has let in, and with another server's."""
    if site.tcp:
        stranger = zmq.curve_keypair()
        server = keys.load_public(Path(site.keys) / "server.pub")
        for pair, of_server in ((None, None), (stranger, server), (stranger, stranger[0])):
            context: zmq.Context[Any] = zmq.Context()
            for _ in range(20):
                client = context.socket(zmq.DEALER)
                client.linger = 0
                if pair is not None:
                    client.curve_publickey, client.curve_secretkey = pair
                    client.curve_serverkey = of_server
                client.connect(site.tcp)
                with suppress(zmq.Again):  # the handshake may fail first: then no peer is left and a send would wait
                    client.send_multipart(pack(Describe()), zmq.NOBLOCK)
            assert not client.poll(300), "an answer for a client without a right key"
            context.destroy(linger=0)
        try:
            Client(site.tcp, timeout=1.0).close()
            raise AssertionError("a client without keys was let in")
        except (EngineDeadError, UsageError):
            pass
    yield from described(site)


@attack("described")
def garbage_over_tcp(site: Site) -> Iterator[Answer]:
    """Bytes at the door that wants keys."""
    host, _, port = site.tcp.removeprefix("tcp://").rpartition(":")
    dice = random.Random(7)
    curve = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    for _ in range(100 if site.tcp else 0):
        with socket.create_connection((host, int(port)), PATIENCE_S) as client, suppress(OSError):
            client.sendall(dice.choice((b"", curve, curve[:12])) + dice.randbytes(dice.randint(0, 400)))
    yield from described(site)


@attack("length", "stop")
def random_parameters(site: Site) -> Iterator[Answer]:
    """Any parameters that are right: the tokens are the oracle's, whatever is sampled how."""

    dice = random.Random(8)
    with Client(site.address) as client:
        about = client.describe()
        asked = [
            SamplingParams(
                temperature=dice.choice((0.0, 0.7, 100.0)),
                top_k=dice.choice((0, 1, 50)),
                top_p=dice.uniform(0.01, 1),
                min_p=dice.random(),
                presence_penalty=dice.uniform(-2, 2),
                seed=dice.getrandbits(63),
                max_tokens=dice.randint(1, 40),
                ignore_eos=True,
                logprobs=dice.choice((None, 0, 5)),
            )
            for _ in range(100)
        ]
        prompts = [[dice.randrange(about.vocab_size) for _ in range(dice.randint(1, 30))] for _ in asked]
        for prompt, params, done in zip(prompts, asked, client.generate(prompts, asked), strict=True):
            expected = oracle(prompt, params, about.vocab_size, about.max_model_len).whole()
            assert (done.token_ids, done.finish_reason) == expected, msgspec.json.encode(params)
            yield Answer(done.finish_reason, "")
