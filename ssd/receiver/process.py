"""The receiver process: the link's end beside the target (docs/remote.md).

To the target it is a draft, to the board its writer. It trusts the target, and nothing that a draft sends."""

from __future__ import annotations

import logging
import random
import re
import resource
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from ssd.errors import SsdError, UsageError
from ssd.ipc import curve, keys, sockets
from ssd.ipc.board import BoardWriter, LinkFigures
from ssd.ipc.link import (
    BEAT_S,
    DRAFT_TO_RECEIVER,
    LINK_BYTES,
    LINK_VERSION,
    SILENT_MS,
    Beat,
    Joined,
    NotAccepted,
    Offer,
    Published,
    TargetVocabulary,
    Terms,
    fingerprint,
)
from ssd.ipc.messages import (
    TARGET_TO_DRAFT,
    Hello,
    Ready,
    Refused,
    Rejoin,
)
from ssd.ipc.process import Child
from ssd.ipc.public import BadFrame, Message, pack, unpack, version_of
from ssd.ipc.trace_ring import State
from ssd.models.vocabularies import vocabulary_of
from ssd.receiver.requests import LATE, Requests

log = logging.getLogger("ssd.receiver")

# Frames a second that are read, and how many at once after a pause. The others wait in their sender's socket.
_RATE, _BURST = 2000.0, 200.0
_WAITING_FRAMES = 64  # of a peer, read but not looked at
_MORE_BYTES = 256 * 2**20  # what this process may take more than at its start
_LOG_S = 60.0


def main(child: Child) -> None:
    """Listen, and let one draft after the other speculate until the supervisor ends this process."""
    receiver = Receiver(child)
    _limit_memory()
    receiver.serve()


@dataclass
class Session:
    """The draft that is connected: its `peer` on the socket, its `key` (empty without keys).

    `joined`: the target knows of it. `rtt` is the mean round trip in seconds, `jitter` its mean deviation."""

    peer: bytes
    key: str
    name: str
    number: int
    joined: bool = False
    rtt: float = 0.0
    jitter: float = 0.0

    def measured(self, seconds: float) -> None:
        """Note a round trip: means of it and of its deviation, as TCP keeps them (RFC 6298)."""
        if self.rtt == 0:
            self.rtt, self.jitter = seconds, seconds / 2
        else:
            self.jitter += (abs(seconds - self.rtt) - self.jitter) / 4
            self.rtt += (seconds - self.rtt) / 8


@dataclass
class Allowance:
    """Bounds the frames that are read: `_RATE` a second, after a pause `_BURST` at once."""

    left: float = _BURST
    at: float = field(default_factory=time.monotonic)

    def taken(self) -> bool:
        """Take one, if there is one left."""
        now = time.monotonic()
        self.left, self.at = min(_BURST, self.left + _RATE * (now - self.at)), now
        if self.left < 1:
            return False
        self.left -= 1
        return True


class Receiver:
    """Owns the listening socket, the connection to the target while a draft is joined, and the board's writer."""

    def __init__(self, child: Child) -> None:
        config = child.config
        assert config.link is not None
        self._child, self._config = child, config
        self._board = BoardWriter(child.start.board_fd, config.max_num_seqs)
        self._vocabulary = vocabulary_of(Path(config.target))
        self._fingerprint = fingerprint(self._vocabulary)
        self._link = _listening(child.context, config.link.bind, config.link.keys)
        self._target: zmq.Socket[bytes] | None = None
        self._session: Session | None = None
        self._number = random.getrandbits(24)
        self._requests = Requests(self._board, child.epoch, config.vocab_size)
        self._allowance = Allowance()
        self._counted: Counter[str] = Counter()
        self._beat_at = 0.0
        self._entries = self._late = self._bytes = 0
        self._log_at = time.monotonic() + _LOG_S

    @property
    def address(self) -> str:
        """Where drafts connect."""
        return self._link.getsockopt_string(zmq.LAST_ENDPOINT)

    def serve(self) -> None:
        self._child.ready()
        self._child.trace.enter(State.IDLE)
        while True:
            self.turn()

    def turn(self) -> None:
        """Wait for something to do, and do all there is."""
        self._child.beat()
        self._wait()
        self._read_target()
        self._read_link()
        self._beat()

    def _wait(self) -> None:
        """Wait for something to read, or until it is time for a beat."""
        poller = zmq.Poller()
        if self._target is not None:
            poller.register(self._target, zmq.POLLIN)
        spent = self._allowance.left < 1
        if not spent:
            poller.register(self._link, zmq.POLLIN)
        poller.poll(int(1000 * BEAT_S / 50 if spent else max(0.0, self._beat_at - time.monotonic()) * 1000) + 1)

    def _beat(self) -> None:
        now = time.monotonic()
        if now >= self._beat_at:
            self._beat_at = now + BEAT_S
            if self._session is not None:
                self._tell(Beat(time.monotonic_ns()))
            self._show()
        if now >= self._log_at:
            self._log_at = now + _LOG_S
            self._report()

    def _show(self) -> None:
        """Put what is measured where the target finds it."""
        session = self._session
        rtt, jitter = (0, 0) if session is None else (int(1e9 * session.rtt), int(1e9 * session.jitter))
        counted = self._entries, self._late, self._bytes, self._requests.tokens
        self._board.show_link(LinkFigures(rtt, jitter, *counted, self._requests.ahead))

    def _report(self) -> None:
        """Log what has come over the link since the last report."""
        if self._counted:
            rtt = 0.0 if self._session is None else self._session.rtt
            counts = ", ".join(f"{count} {what}" for what, count in sorted(self._counted.items()))
            log.info("link: round trip %.1f ms, %s", 1000 * rtt, counts)
            self._counted.clear()

    # -- the target -------------------------------------------------------------------------------------------------

    def _read_target(self) -> None:
        """Pass on what the target tells its draft."""
        session = self._session
        if self._target is None or session is None:
            return
        for _, _, message in sockets.drained(self._target, TARGET_TO_DRAFT):
            if isinstance(message, Ready):
                continue
            if isinstance(message, Refused):
                raise SsdError(message.message)
            if not all(self._tell(part) for part in self._requests.told(message, session.rtt + session.jitter)):
                return
            if isinstance(message, Rejoin):
                self._hello()

    def _hello(self) -> None:
        assert self._target is not None
        hello = Hello("draft", self._config.vocab_size, self._config.digest, reads=self._reads())
        sockets.send(self._target, hello, self._child.epoch)

    def _reads(self) -> str | None:
        """Whose requests the draft may read: those of the client with its own name, or all (None)."""
        link, session = self._config.link, self._session
        assert link is not None and session is not None
        if not link.own:
            return None
        return (curve.name_of(Path(link.keys), session.key) if link.keys else None) or ""

    # -- the draft --------------------------------------------------------------------------------------------------

    def _tell(self, message: Message) -> bool:
        """Send to the draft. Where it is gone or does not read, the session ends."""
        session = self._session
        assert session is not None
        sent = self._send(session.peer, message, session.number)
        if sent != "sent":
            self._end("it is gone" if sent == "gone" else "it does not read what the target tells it")
        return sent == "sent"

    def _send(self, peer: bytes, message: Message, number: int = 0, version: int = LINK_VERSION) -> sockets.Sent:
        frames = pack(message, number, version)
        self._bytes += sum(map(len, frames))
        return sockets.offer_frames(self._link, [peer, *frames])

    def _end(self, why: str) -> None:
        """End the session: for the target the draft is gone."""
        session, self._session = self._session, None
        assert session is not None
        self._requests.clear()
        if self._target is not None:
            self._target.close(linger=0)
            self._target = None
        if session.joined:
            log.warning("the draft %s on another machine was lost: %s", session.name, why)

    def _read_link(self) -> None:
        while int(self._link.getsockopt(zmq.EVENTS)) & zmq.POLLIN and self._allowance.taken():
            first = self._link.recv(flags=zmq.NOBLOCK, copy=False)
            frames = self._link.recv_multipart() if first.more else []
            self._bytes += sum(map(len, frames))
            self._heard(first.bytes, curve.user_of(first), frames)

    def _heard(self, peer: bytes, key: str, frames: list[bytes]) -> None:
        """Handle a frame of a peer with the `key`. Whatever it is, it costs no more than to be dropped."""
        version = version_of(frames)
        if version is not None and version != LINK_VERSION:
            self._refuse(peer, f"this engine speaks version {LINK_VERSION} of the link, the draft {version}", version)
            return
        try:
            number, message = unpack(frames, DRAFT_TO_RECEIVER)
        except BadFrame as error:
            self._counted["frames that are no message"] += 1
            log.debug("dropped a frame: %s", error)
            return
        session = self._session
        if isinstance(message, Offer):
            self._offered(peer, key, message)
        elif session is None or (peer, number) != (session.peer, session.number):
            self._counted["frames of no session"] += 1
            self._send(peer, NotAccepted("there is no such session", again=True))
        elif isinstance(message, Joined):
            self._joined(session)
        elif session.joined:
            self._published(session, message)

    def _refuse(self, peer: bytes, why: str, version: int = LINK_VERSION, again: bool = False) -> None:
        log.warning("refused a draft: %s", why)
        self._send(peer, NotAccepted(why, again), version=version)

    def _offered(self, peer: bytes, key: str, offer: Offer) -> None:
        """Begin a session, unless another draft is there, or it speaks another vocabulary: it is told the target's."""
        session, config = self._session, self._config
        name = repr(offer.name[:64])
        if session is not None and (session.key != key or not key) and session.peer != peer and self._is_there(session):
            self._send(peer, NotAccepted("another draft is connected", again=True))
            return
        ours, theirs = (self._fingerprint, config.vocab_size), (offer.vocabulary, offer.vocab_size)
        if all(ours) and all(theirs) and ours[0] != theirs[0]:
            log.info("the draft %s speaks another vocabulary", name)
            self._send(peer, TargetVocabulary(self._vocabulary or {}))
            return
        if not (ours[0] and theirs[0]) and ours[1] != theirs[1]:
            self._refuse(peer, f"vocabularies of {ours[1]} (target) and {theirs[1]} (draft) tokens, and no tokenizers")
            return
        if self._session is not None:
            self._end("it has connected anew")
        self._number = (self._number + 1) % 2**32
        self._session = Session(peer, key, name, self._number)
        self._tell(
            Terms(config.target_name, config.vocab_size, config.max_num_seqs, config.max_model_len, config.speculation)
        )

    def _is_there(self, session: Session) -> bool:
        return self._session is session and self._tell(Beat(time.monotonic_ns()))

    def _joined(self, session: Session) -> None:
        if session.joined:
            return
        session.joined = True
        log.warning("the draft %s on another machine is connected", session.name)
        identity = b"draft-%d-%d" % (self._child.epoch, session.number)
        self._target = sockets.dealer(self._child.context, self._child.address(sockets.ENGINE), identity)
        self._hello()

    def _published(self, session: Session, published: Published) -> None:
        """Put entries on the board that the target may look for, and count progress."""
        if published.echo:
            session.measured(max(1, time.monotonic_ns() - published.echo - published.held) / 1e9)
        for trunk in published.trunks:
            self._counted[self._requests.expect(trunk)] += 1
        for entry in published.entries:
            found = self._requests.publish(entry)
            self._counted[found] += 1
            self._entries += 1
            self._late += found.endswith(LATE)
        self._board.count(published.progress, published.steps, published.nanoseconds, published.grown)


def _listening(context: zmq.Context[Any], address: str, folder: str | None) -> zmq.Socket[bytes]:
    """Returns the socket that drafts connect to. Raises UsageError."""
    if folder is None:
        socket = sockets.public_router(context, LINK_BYTES)
    else:
        keys.check_server(Path(folder))
        socket = curve.secure_router(context, Path(folder), LINK_BYTES)
    socket.setsockopt(zmq.RCVHWM, _WAITING_FRAMES)
    sockets.notice_silence(socket, SILENT_MS)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise UsageError(f"--draft-bind {address}: {error.strerror}") from None
    return socket


def _limit_memory() -> None:
    """Let this process take a bounded amount of memory: libzmq bounds no message of many frames."""
    found = re.search(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    most = int(found[1]) * 1024 + _MORE_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
