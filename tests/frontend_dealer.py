"""The frontend's socket to a target in the hands of a test."""

from __future__ import annotations

from typing import Any

import zmq

from ssd.ipc import sockets
from ssd.ipc.messages import TARGET_TO_FRONTEND, Emission, Step
from ssd.ipc.public import Message
from tests.scripted_engine import PATIENCE_S


class Frontend:
    """The frontend's DEALER in the hands of a test."""

    def __init__(self, address: str, identity: bytes = b"frontend-1") -> None:
        self.address = address
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = sockets.dealer(self.context, address, identity)

    def send(self, message: Message) -> None:
        assert sockets.send(self.socket, message)

    def receive(self) -> Any:
        assert self.socket.poll(int(1000 * PATIENCE_S)), "nothing came from the target"
        received = sockets.receive(self.socket, TARGET_TO_FRONTEND)
        assert received is not None
        return received[2]

    def step(self) -> Step:
        step = self.receive()
        assert isinstance(step, Step)
        return step

    def until_the_end(self, request: int) -> list[Emission]:
        """All emissions up to the last one of a request."""
        emissions: list[Emission] = []
        while not any(each.request == request and each.finish_reason for each in emissions):
            emissions += self.step().emissions
        return emissions
