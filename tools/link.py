"""A TCP proxy that behaves like a long or bad link: delay, jitter, a limited rate, stalls and resets.

    python -m tools.link 127.0.0.1:6000 127.0.0.1:5556 --delay 10 --jitter 2

Bytes stay in order in each direction. `Link` is for programs, which may also stall and reset it when they like."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

_CHUNK = 64 * 2**10
_WAITING = 256  # chunks on their way in one direction; a sender of more is slowed down
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST


@dataclass
class Behaviour:
    """Of each direction: seconds of `delay`, up to `jitter` more, `rate` in bytes per second (0: any).

    About every `stall_every` seconds nothing passes for `stall` seconds, and about every `reset_every` seconds all
    connections are reset; 0: never."""

    delay: float = 0.0
    jitter: float = 0.0
    rate: float = 0.0
    stall: float = 0.0
    stall_every: float = 0.0
    reset_every: float = 0.0


class Link:
    """Passes connections to (host, port) `listen` on to `target`. Its methods belong to one event loop."""

    def __init__(
        self, listen: tuple[str, int], target: tuple[str, int], behaviour: Behaviour, seed: int | None = None
    ) -> None:
        self.behaviour = behaviour
        self.passed = 0  # bytes, both directions
        self._listen, self._target = listen, target
        self._random = random.Random(seed)
        self._stalled_until = 0.0
        self._writers: set[asyncio.StreamWriter] = set()

    async def run(self) -> None:
        """Serve until cancelled."""
        server = await asyncio.start_server(self._connected, *self._listen)
        async with server:
            await asyncio.gather(server.serve_forever(), self._stalls(), self._resets())

    def stall(self, seconds: float) -> None:
        """Let nothing pass for so many seconds."""
        self._stalled_until = max(self._stalled_until, asyncio.get_running_loop().time() + seconds)

    def reset(self) -> None:
        """Break all connections."""
        for writer in self._writers:
            connection: socket.socket = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()

    async def _stalls(self) -> None:
        while self.behaviour.stall_every:
            await asyncio.sleep(self._random.expovariate(1 / self.behaviour.stall_every))
            self.stall(self.behaviour.stall)

    async def _resets(self) -> None:
        while self.behaviour.reset_every:
            await asyncio.sleep(self._random.expovariate(1 / self.behaviour.reset_every))
            self.reset()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        pair = {writer, back}
        self._writers |= pair
        for one in pair:
            one.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await _first_to_end(self._pass(reader, back), self._pass(there, writer))
        finally:
            self._writers -= pair
            for one in pair:
                one.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass one direction on until it ends."""
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_WAITING)
        await _first_to_end(self._take(reader, waiting), self._give(waiting, writer))

    async def _take(self, reader: asyncio.StreamReader, waiting: asyncio.Queue[tuple[float, bytes]]) -> None:
        """Read, and note when each chunk is due at the other end."""
        clock, due = asyncio.get_running_loop().time, 0.0
        while True:
            chunk = await reader.read(_CHUNK)
            how = self.behaviour
            due = max(due, clock() + how.delay + how.jitter * self._random.random())
            due += len(chunk) / how.rate if how.rate else 0.0
            await waiting.put((due, chunk))
            if not chunk:
                await asyncio.Event().wait()  # the other half ends this one

    async def _give(self, waiting: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due, chunk = await waiting.get()
            while (left := max(due, self._stalled_until) - clock()) > 0:
                await asyncio.sleep(left)
            if not chunk:
                return
            self.passed += len(chunk)
            writer.write(chunk)
            await writer.drain()


async def _first_to_end(*halves: Coroutine[Any, Any, None]) -> None:
    """Run two halves until one of them ends, however it ends; then end the other."""
    tasks = [asyncio.ensure_future(half) for half in halves]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def address(text: str) -> tuple[str, int]:
    """Returns (host, port) of HOST:PORT."""
    host, _, port = text.rpartition(":")
    return host, int(port)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("listen", type=address, help="HOST:PORT to listen on")
    parser.add_argument("target", type=address, help="HOST:PORT to pass connections on to")
    for name, text in (
        ("delay", "milliseconds in each direction"),
        ("jitter", "up to so many milliseconds more"),
        ("stall", "milliseconds of a stall"),
    ):
        parser.add_argument(f"--{name}", type=lambda value: float(value) / 1000, default=0.0, help=text)
    parser.add_argument("--rate", type=float, default=0.0, help="bytes per second in each direction")
    parser.add_argument("--stall-every", type=float, default=0.0, help="seconds between stalls, on average")
    parser.add_argument("--reset-every", type=float, default=0.0, help="seconds between resets, on average")
    given = vars(parser.parse_args())
    link = Link(given.pop("listen"), given.pop("target"), Behaviour(**given))
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(link.run())


if __name__ == "__main__":
    main()
