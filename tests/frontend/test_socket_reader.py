"""A socket in an event loop: every message is handled, whatever became of the one before it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import zmq

from ssd.frontend.socket_reader import SocketReader
from ssd.ipc import sockets
from ssd.ipc.public import CLIENT_TO_FRONTEND, Cancel, pack
from tests.scripted_engine import PATIENCE_S


def with_sockets(directory: Path, body: Callable[[Any, Any], Coroutine[Any, Any, None]]) -> None:
    address = f"ipc://{directory}/s"
    with (
        zmq.Context() as context,
        sockets.router(context, address) as router,
        sockets.dealer(context, address) as dealer,
    ):
        asyncio.run(asyncio.wait_for(body(router, dealer), PATIENCE_S))


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def all_there(router: Any, dealer: Any, *messages: Cancel) -> None:
    """The messages have arrived, and the event loop has not seen them."""
    for message in messages:
        dealer.send_multipart(pack(message))
    time.sleep(0.2)


def test_a_bug_costs_its_message_and_not_those_after_it(tmp_path: Path) -> None:
    async def body(router: Any, dealer: Any) -> None:
        handled: list[int] = []

        def handle(peer: bytes, message: Cancel) -> None:
            handled.append(message.id)
            assert message.id != 1, "a bug"

        reader = SocketReader(router, CLIENT_TO_FRONTEND, handle, 8, lambda: None)
        all_there(router, dealer, *[Cancel(name) for name in range(20)])
        await until(lambda: len(handled) == 20)
        assert handled == list(range(20))
        reader.close()

    with_sockets(tmp_path, body)


def test_asking_what_waits_does_not_make_it_wait_for_ever(tmp_path: Path) -> None:
    async def body(router: Any, dealer: Any) -> None:
        handled: list[int] = []
        reader = SocketReader(router, CLIENT_TO_FRONTEND, lambda _, said: handled.append(said.id), 8, lambda: None)
        await asyncio.sleep(0.2)  # the connection is up, and it has looked
        assert not reader.waiting
        all_there(router, dealer, Cancel(1))
        assert reader.waiting
        await until(lambda: handled)
        assert not reader.waiting
        reader.close()

    with_sockets(tmp_path, body)
