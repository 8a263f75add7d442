"""The store of torch.distributed in which the ranks of a target on several machines meet.

The supervisor keeps it, so that it outlives every group of ranks. It holds no secret, and does not authenticate its
users."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from ssd.errors import SsdError
from ssd.ipc.listening import listen_for_ranks

if TYPE_CHECKING:
    from torch.distributed import Store

_ANSWER = timedelta(seconds=30)  # for a value that exists


def host(address: str) -> tuple[Store, str]:
    """Return a store on a free port of this machine's `address`, and its endpoint, "HOST:PORT". Raises UsageError."""
    from torch.distributed import TCPStore

    listening = listen_for_ranks(address)  # on this address alone; the store would listen on all
    port = listening.getsockname()[1]
    store = TCPStore(address, port, None, True, _ANSWER, wait_for_workers=False, master_listen_fd=listening.detach())
    return store, f"{address}:{port}"


def connect(endpoint: str) -> Store:
    """Return the store at an endpoint. Raises SsdError."""
    from torch.distributed import TCPStore

    try:
        return TCPStore(*_parts(endpoint), None, False, _ANSWER, wait_for_workers=False)
    except RuntimeError as error:
        first, *_ = str(error).splitlines() or [""]
        raise SsdError(f"the supervisor's store at {endpoint} is gone: {first}") from None


def own_address(endpoint: str) -> str:
    """Return the address from which this machine reaches the endpoint, for other machines."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_parts(endpoint))
        return str(probe.getsockname()[0])


def _parts(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host, int(port)
