"""Several machines with one target: the store in which they meet.

The store is torch.distributed's at `--rdzv-endpoint`. The supervisor of node 0 keeps it, so that it outlives every
group of ranks. Node 0 writes which group is to run. The other nodes write which of them failed, and count to show that
they are there. Nothing in it is secret, and nobody who reaches it is authenticated."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec.structs import replace

from ssd.config.engine import EngineConfig, Nodes, ServerConfig
from ssd.errors import SsdError, UsageError
from ssd.ipc.listening import listen_for_nodes

if TYPE_CHECKING:
    from torch.distributed import Store

_ANSWER = timedelta(seconds=30)  # for a value that exists
_FAREWELL_S = 1.0
_KNOCK_S = 0.2
# A node whose counter stands still for so long is gone. A busy one takes a tenth of it for a turn.
_SILENT_S = 10.0


class HostEnded(Exception):
    """Node 0 has ended. The message is the cause, or empty if it was asked to end."""


def connect(nodes: Nodes) -> Store:
    """Returns the store that node 0 keeps. Raises SsdError where it cannot be reached."""
    from torch.distributed import TCPStore

    with _reaching(nodes):
        return TCPStore(*nodes.address, None, False, _ANSWER, wait_for_workers=False)


def own_address(nodes: Nodes) -> str:
    """Returns this machine's address that the others reach: the one that would talk to the endpoint."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(nodes.address)
        return str(probe.getsockname()[0])


class _Count(NamedTuple):
    turns: int
    since: float


class Host:
    """Node 0's side. Raises UsageError where it cannot listen at the endpoint."""

    def __init__(self, config: EngineConfig) -> None:
        from torch.distributed import TCPStore

        assert config.nodes is not None
        self._nodes = config.nodes
        host, port = self._nodes.address
        listening = listen_for_nodes(host, port)  # on this address alone; the store would listen on all
        self._store = TCPStore(
            host, port, None, True, _ANSWER, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        followers = replace(config, server=ServerConfig())  # they serve nobody, and API keys are nobody else's
        self._store.set("config", msgspec.json.encode(followers).decode())
        self._group: int | None = None
        self._counts: dict[int, _Count] = {}

    def begin(self, group: int) -> None:
        """Tells every node to run this group of ranks."""
        self._group = group
        self._counts.clear()
        self._store.set("group", str(group))

    def over(self) -> None:
        """Notes that the group has ended."""
        self._group = None

    def failure(self, now: float) -> str | None:
        """Returns why the running group cannot go on because of another node, or None. `now` in seconds."""
        if self._group is None:
            return None
        if self._store.check([f"failed/{self._group}"]):
            return self._store.get(f"failed/{self._group}").decode()
        silent = [node for node in range(1, self._nodes.count) if self._silent(node, now)]
        return f"node {silent[0]} says nothing any more" if silent else None

    def _silent(self, node: int, now: float) -> bool:
        """True if a node that joined this group has stopped counting."""
        key = f"alive/{self._group}/{node}"
        if not self._store.check([key]):
            return False
        turns = int(self._store.get(key))
        seen = self._counts.get(node)
        if seen is None or seen.turns != turns:
            self._counts[node] = _Count(turns, now)
            return False
        return now - seen.since > _SILENT_S

    def end(self, cause: str) -> None:
        """Tells the others that it is over, and the cause if nobody asked for it; waits for them to hear it."""
        self._store.set("ended", cause)
        deadline = time.monotonic() + _FAREWELL_S
        while self._store.add("heard", 0) < self._store.add("joined", 0) and time.monotonic() < deadline:
            time.sleep(_KNOCK_S / 10)


class Guest:
    """Another node's side. Every method raises SsdError when node 0 cannot be reached any more."""

    def __init__(self, nodes: Nodes, patience_s: float) -> None:
        """Waits up to `patience_s` seconds until node 0 is there."""
        self._nodes = nodes
        _knock(nodes, time.monotonic() + patience_s)
        self._store = connect(nodes)
        with _reaching(nodes):
            self._store.add("joined", 1)

    def config(self) -> EngineConfig:
        """Returns node 0's configuration."""
        with _reaching(self._nodes):
            found = self._store.get("config")
        try:
            return msgspec.json.decode(found, type=EngineConfig)
        except msgspec.MsgspecError as error:
            raise UsageError(f"node 0 runs another version of ssd: {error}") from None

    def group(self) -> int | None:
        """Returns which group of ranks is to run, or None. Raises `HostEnded`.
        Call it repeatedly: each call shows that this node is there."""
        with _reaching(self._nodes):
            if self._store.check(["ended"]):
                self._store.add("heard", 1)
                raise HostEnded(self._store.get("ended").decode())
            if not self._store.check(["group"]):
                return None
            group = int(self._store.get("group"))
            self._store.add(f"alive/{group}/{self._nodes.rank}", 1)
        return group

    def failed(self, group: int, cause: str) -> None:
        """Reports that this node's ranks of the group cannot go on."""
        with contextlib.suppress(RuntimeError):  # node 0 may be gone; the next call tells
            self._store.set(f"failed/{group}", cause)


def _knock(nodes: Nodes, deadline: float) -> None:
    """Waits until node 0 accepts a connection, in steps that a signal can interrupt."""
    while True:
        try:
            socket.create_connection(nodes.address, timeout=_ANSWER.total_seconds()).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise SsdError(f"nobody is at {nodes.endpoint}: {error}") from None
        time.sleep(_KNOCK_S)


@contextlib.contextmanager
def _reaching(nodes: Nodes) -> Iterator[None]:
    """Turns errors of the store into the SsdError that node 0 cannot be reached."""
    try:
        yield
    except RuntimeError as error:
        first, *_ = str(error).splitlines() or [""]
        raise SsdError(f"node 0 at {nodes.endpoint} is gone: {first}") from None
