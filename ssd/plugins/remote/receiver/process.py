"""The receiver process: the link's end beside the target, which trusts no draft (docs/remote.md)."""

from __future__ import annotations

import logging
import random
import re
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import zmq

from ssd.ipc import curve, sockets
from ssd.ipc.board import BoardWriter
from ssd.ipc.messages import TARGET_TO_DRAFT, Hello, LinkLoad, Readers, Ready, Rejoin
from ssd.ipc.peer_connections import raise_descriptor_limit
from ssd.ipc.process import Child
from ssd.ipc.public import BadFrame, Message, pack, printable, unpack, version_of
from ssd.ipc.trace_ring import State
from ssd.models.vocabularies import vocabulary_of
from ssd.plugins.remote import link
from ssd.plugins.remote.receiver.relay import LOOK_S, Guard, Relay
from ssd.plugins.remote.receiver.requests import LATE, MOST_DEBT, Requests
from ssd.plugins.remote.receiver.sessions import MOST_SESSIONS, Allowance, Session, Sessions

log = logging.getLogger("ssd.receiver")

# Frames a second that are read, and those that are examined of peers without a session.
_READ, _STRANGERS = 20_000.0, 200.0
_WAITING_FRAMES = 64  # of a connection
_TURN_S = 0.0005  # longest turn of the relay's thread while this one waits for the interpreter
_MORE_BYTES = 512 * 2**20  # memory that this process may take beyond that at its start
_LOG_S = 60.0
_MOST_COUNTED = 2**16  # largest count in a frame
_BARRED_S = 30.0  # a draft that was of no use is refused for this time while there are others


def main(child: Child) -> None:
    raise_descriptor_limit()
    sys.setswitchinterval(_TURN_S)
    receiver = Receiver(child)
    _limit_memory()
    child.ready()
    child.trace.enter(State.IDLE)
    while True:
        receiver.turn()


class Receiver:
    """Owns the listening socket, the board's writer, and one connection to the target for all drafts."""

    def __init__(self, child: Child) -> None:
        config = child.config
        assert config.link is not None
        self._child, self._config, self._keys, self._own = child, config, config.link.keys, config.link.own
        self._board = BoardWriter(child.start.board_fd, config.max_num_seqs)
        vocabulary = vocabulary_of(Path(config.target))
        self._fingerprint = link.fingerprint(vocabulary)
        self._vocabulary = pack(link.TargetVocabulary(vocabulary or {}))
        inner = child.address(sockets.LINK)
        relay = Relay(config.link.bind, inner)
        self.address = relay.address
        """The address to which drafts connect."""
        self._link = _router(child.context, self._keys)
        self._guard = Guard(self._link, relay)
        self._link.bind(inner)
        self._target: zmq.Socket[bytes] | None = None
        self._sessions = Sessions(self._own)
        self._number = random.getrandbits(24)
        self._allowance, self._strangers = Allowance(_READ), Allowance(_STRANGERS)
        self._barred: dict[str, float] = {}  # keys of refused drafts, and until when
        self._counted: Counter[str] = Counter()
        self._beat_at = 0.0
        self._entries = self._late = self._bytes = self._tokens = 0
        self._log_at = time.monotonic() + _LOG_S

    def turn(self) -> None:
        self._child.beat()
        poller = zmq.Poller()
        if self._target is not None:
            poller.register(self._target, zmq.POLLIN)
        spent = self._allowance.left < 1
        if not spent:
            poller.register(self._link, zmq.POLLIN)
        poller.poll(5 if spent else int(1000 * LOOK_S))
        self._read_target()
        self._read_link()
        self._guard.look(self._sessions)
        self._beat()

    def _beat(self) -> None:
        """Send beats, show the link's figures and log its counts, each when it is time."""
        now = time.monotonic()
        if now >= self._beat_at:
            self._beat_at = now + link.BEAT_S
            for session in self._sessions:
                self._tell(session, link.Beat(time.monotonic_ns()))
            self._show()
        if now >= self._log_at:
            self._log_at = now + _LOG_S
            if self._counted:
                rtt = max((session.rtt for session in self._sessions), default=0.0)
                counts = ", ".join(f"{count} {what}" for what, count in sorted(self._counted.items()))
                log.info("link: round trip %.1f ms, %s", 1000 * rtt, counts)
                self._counted.clear()

    def _show(self) -> None:
        found = max(self._sessions.joined, key=lambda session: session.rtt, default=None)
        far = (0.0, 0.0) if found is None else (found.rtt, found.jitter)
        tokens = self._tokens + sum(session.requests.tokens for session in self._sessions)
        counted = self._entries, self._late, self._bytes, tokens
        self._board.show_link(LinkLoad(*far, *counted, 0 if found is None else found.requests.ahead))

    # -- the target -------------------------------------------------------------------------------------------------

    def _read_target(self) -> None:
        if self._target is None:
            return
        for _, _, message in sockets.drained(self._target, TARGET_TO_DRAFT):
            if isinstance(message, Ready):
                continue
            for session, part in self._sessions.routed(message):
                told = session.requests.told(part, session.rtt + session.jitter)
                if self._sessions.of(session.peer) is session and all(self._tell(session, one) for one in told):
                    self._judge(session)
            if isinstance(message, Rejoin):
                self._sessions.clear()
                if self._target is not None:
                    self._hello()
            if self._target is None:
                return

    def _judge(self, session: Session) -> None:
        """End a useless draft's session if there are others: the target's breaker sees only all together."""
        if session.requests.debt < MOST_DEBT or self._own or len(self._sessions.joined) < 2:
            return
        why = "its tokens are not accepted"
        self._send(session.peer, link.NotAccepted(why, again=True), session.number)
        if session.key:
            self._barred[session.key] = time.monotonic() + _BARRED_S
        self._end(session, why)

    def _hello(self) -> None:
        assert self._target is not None
        hello = Hello("draft", reads=self._sessions.readers)
        sockets.send(self._target, hello, self._child.epoch)

    def _change(self, lost: list[int]) -> None:
        assert self._target is not None
        sockets.send(self._target, Readers(self._sessions.readers, lost), self._child.epoch)

    # -- the draft --------------------------------------------------------------------------------------------------

    def _tell(self, session: Session, message: Message) -> bool:
        sent = self._send(session.peer, message, session.number)
        if sent != "sent":
            self._end(session, "it is gone" if sent == "gone" else "it does not read what the target tells it")
        return sent == "sent"

    def _send(self, peer: bytes, message: Message, number: int = 0, version: int = link.LINK_VERSION) -> sockets.Sent:
        frames = pack(message, number, version)
        self._bytes += sum(map(len, frames))
        return sockets.offer_frames(self._link, [peer, *frames])

    def _end(self, session: Session, why: str) -> None:
        """End a session, tell the target which requests lost their draft; leave it after the last session."""
        lost = self._sessions.remove(session)
        self._tokens += session.requests.tokens
        if not session.joined:
            return
        log.warning("the draft %s on another machine was lost: %s", session.name, why)
        if self._sessions.joined:
            self._change(lost)
        elif self._target is not None:
            self._target.close(linger=0)
            self._target = None

    def _read_link(self) -> None:
        while int(self._link.getsockopt(zmq.EVENTS)) & zmq.POLLIN and self._allowance.taken():
            first = self._link.recv(flags=zmq.NOBLOCK, copy=False)
            frames = self._link.recv_multipart() if first.more else []
            size = sum(map(len, frames))
            self._bytes += size
            self._guard.took(first.bytes, int(first.get(zmq.SRCFD)), size)
            session = self._sessions.of(first.bytes)
            if (self._strangers if session is None else session.allowance).taken():
                self._heard(first.bytes, curve.user_of(first), frames)
            else:
                self._counted["frames beyond the allowance"] += 1

    def _heard(self, peer: bytes, key: str, frames: list[bytes]) -> None:
        """Handle a frame of a peer with the `key`, and drop a bad one."""
        version, ours = version_of(frames), link.LINK_VERSION
        if version is not None and version != ours:
            self._refuse(peer, f"this engine speaks version {ours} of the link, the draft {version}", version)
            return
        try:
            number, message = unpack(frames, link.DRAFT_TO_RECEIVER)
        except BadFrame as error:
            self._counted["frames that are no message"] += 1
            log.debug("dropped a frame: %s", error)
            return
        session = self._sessions.of(peer)
        if isinstance(message, link.Offer):
            self._offered(peer, key, message)
        elif session is None or number != session.number:
            self._counted["frames of no session"] += 1
            self._send(peer, link.NotAccepted("there is no such session", again=True))
        elif isinstance(message, link.Joined):
            self._joined(session)
        elif session.joined:
            self._published(session, message)

    def _refuse(self, peer: bytes, why: str, version: int = link.LINK_VERSION, again: bool = False) -> None:
        log.warning("refused a draft: %s", why)
        self._send(peer, link.NotAccepted(why, again), version=version)

    def _offered(self, peer: bytes, key: str, offer: link.Offer) -> None:
        """Begin a session, unless there are too many; tell a draft of another vocabulary the target's."""
        config = self._config
        name = repr(printable(offer.name, 64))
        ours, theirs = (self._fingerprint, config.vocab_size), (offer.vocabulary, offer.vocab_size)
        if all(ours) and all(theirs) and ours[0] != theirs[0]:
            log.info("the draft %s speaks another vocabulary", name)
            self._bytes += sum(map(len, self._vocabulary))
            sockets.offer_frames(self._link, [peer, *self._vocabulary], copy=False)
            return
        if not (ours[0] and theirs[0]) and ours[1] != theirs[1]:
            self._refuse(peer, f"vocabularies of {ours[1]} (target) and {theirs[1]} (draft) tokens, and no tokenizers")
            return
        if time.monotonic() < self._barred.get(key, 0.0) and self._sessions.joined:
            self._send(peer, link.NotAccepted("its tokens were not accepted", again=True))
            return
        if (before := self._sessions.rival(peer, key)) is not None:
            self._end(before, "it has connected anew")
        if len(self._sessions) >= MOST_SESSIONS:
            self._send(peer, link.NotAccepted(f"{MOST_SESSIONS} other drafts are connected", again=True))
            return
        self._number = (self._number + 1) % 2**32
        client = key and self._keys and curve.name_of(Path(self._keys), key)
        requests = Requests(self._board, self._child.epoch, config.vocab_size)
        session = Session(peer, key, name, self._number, requests, client or "")
        self._sessions.add(session)
        terms = config.max_num_seqs, config.max_model_len, config.speculation
        self._tell(session, link.Terms(config.target_name, config.vocab_size, *terms))

    def _joined(self, session: Session) -> None:
        if session.joined:
            return
        session.joined = True
        log.warning("the draft %s on another machine is connected", session.name)
        if self._target is not None:
            self._change([])
            return
        identity = b"draft-%d-%d" % (self._child.epoch, session.number)
        self._target = sockets.dealer(self._child.context, self._child.address(sockets.ENGINE), identity)
        self._hello()

    def _published(self, session: Session, published: link.Published) -> None:
        """Put the entries that the target may look for on the board, and count progress."""
        now = time.monotonic_ns()
        if published.echo and 0 < (rtt := now - published.echo - published.held) <= link.SILENT_MS * 10**6:
            session.measured(rtt / 1e9)
        for trunk in published.trunks:
            self._counted[session.requests.expect(trunk)] += 1
        for entry in published.entries:
            found = session.requests.publish(entry)
            self._counted[found] += 1
            self._entries += 1
            self._late += found.endswith(LATE)
        counted = (min(count, _MOST_COUNTED) for count in (published.progress, published.steps, published.grown))
        progress, steps, grown = counted
        self._board.count(progress, steps, session.worked(published.nanoseconds, now), grown)


def _router(context: zmq.Context[Any], folder: str | None) -> zmq.Socket[bytes]:
    """Return the unbound socket that reads drafts' messages. Raises UsageError for bad keys."""
    socket = curve.router_for_others(context, folder, link.LINK_BYTES)
    socket.setsockopt(zmq.RCVHWM, _WAITING_FRAMES)
    sockets.notice_silence(socket, link.SILENT_MS)
    return socket


def _limit_memory() -> None:
    """Limit the memory of this process. At the limit libzmq aborts it."""
    found = re.search(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    most = int(found[1]) * 1024 + _MORE_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
