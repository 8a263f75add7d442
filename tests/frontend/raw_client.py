"""Hand-made clients of the gateway, well-behaved and otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import zmq

from ssd.config.engine import Limits, ServerConfig
from ssd.config.params import SamplingParams
from ssd.frontend.process import Frontend
from ssd.ipc import sockets
from ssd.ipc.public import FRONTEND_TO_CLIENT, Chunk, Describe, Generate, Message, pack
from tests.scripted_engine import PATIENCE_S, ScriptedEngine, engine_config, gateway_thread, scripted_engine

FLOOD = 5000
"""Messages: more than the transport's queues hold from a gateway to a client."""


class RawClient:
    """A peer of the gateway that says exactly what the test wants."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDTIMEO, int(1000 * PATIENCE_S))
        self._socket.connect(address)

    def send(self, message: Message) -> None:
        self.send_frames(*pack(message))

    def send_frames(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def stop_reading(self) -> None:
        """Leave so many answers unread that the gateway can send no more, once it has read all that was said so far."""
        for _ in range(FLOOD):
            self.send_frames(*pack(Describe()))

    @property
    def answered(self) -> bool:
        return bool(self._socket.poll(0))

    def receive(self) -> Any:
        """The next message that says something."""
        while isinstance(message := self.receive_any(), Chunk) and not message.token_ids:
            pass
        return message

    def receive_any(self) -> Any:
        assert self._socket.poll(int(1000 * PATIENCE_S)), "no answer from the gateway"
        received = sockets.receive(self._socket, FRONTEND_TO_CLIENT)
        assert received is not None
        return received[2]

    def ask(self, message: Message) -> Any:
        self.send(message)
        return self.receive()

    def close(self) -> None:
        self._context.destroy(linger=0)


def ids(name: int) -> Generate:
    """A prompt that needs no tokenizer, and so is submitted at once."""
    return Generate(name, token_ids=[28120])


def prompt(name: int, text: str = "hello", **params: Any) -> Generate:
    return Generate(name, text, params=SamplingParams(**params))


@dataclass
class Setup:
    """The real frontend in a thread, a scripted target behind it, and one client."""

    engine: ScriptedEngine
    frontend: Frontend
    client: RawClient


@contextmanager
def scripted_frontend(**limits: Any) -> Iterator[Setup]:
    server = ServerConfig(names=("scripted",), limits=Limits(**limits))
    with scripted_engine() as engine, gateway_thread(engine, engine_config(server=server)) as frontend:
        client = RawClient(engine.address)
        yield Setup(engine, frontend, client)
        client.close()
