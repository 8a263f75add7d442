"""The engine's end of its own socket, whatever engine it is: what arrives, and who is let in."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import zmq

from ssd.config import EngineConfig
from ssd.ipc import sockets
from ssd.ipc.messages import PEER_TO_TARGET, ArenaHandle, Hello, Ready, Refused
from ssd.ipc.process import Child

log = logging.getLogger("ssd.ipc")

IDLE_MS = 100
"""How long an engine without work sleeps before it shows again that it is alive."""


def arrived(socket: zmq.Socket[bytes]) -> Iterator[tuple[bytes, int, Any]]:
    """(peer, epoch, message) of everything that is there. Frames that are no message, or of another version of the
    protocol, are dropped with a word in the log."""
    return sockets.drained(socket, PEER_TO_TARGET)


def welcome(
    socket: zmq.Socket[bytes], child: Child, peer: bytes, hello: Hello, arenas: Sequence[ArenaHandle] = ()
) -> bool:
    """Answer a `Hello`; `arenas` are what is exported to a draft. Whether it was of the same model and vocabulary."""
    reason = _objection(child.config, hello)
    answer = Ready(list(arenas) if hello.role == "draft" else []) if reason is None else Refused(reason)
    if not sockets.send(socket, answer, child.epoch, peer):
        log.warning("%r was gone before it was answered", peer)
    return reason is None


def _objection(config: EngineConfig, hello: Hello) -> str | None:
    if hello.digest != config.digest:
        return f"this engine runs {config.target_name[:128]}; the {hello.role} was started for another model"
    if hello.vocab_size != config.vocab_size:
        return f"this engine's vocabulary has {config.vocab_size} tokens, that of the {hello.role} {hello.vocab_size}"
    return None
