"""The choice of a replica for a request: one with the prompt's beginning in its prefix cache, unless it is too busy.

Ray's own router of this kind (`ray.serve.llm`) keeps its state in an actor; if that is lost, no request is routed any
more. This one only remembers the requests that its caller, the ingress, has sent."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from random import sample
from typing import Generic, TypeVar

_Replica = TypeVar("_Replica", bound=Hashable)

_SHORTEST = 64  # characters; each further remembered beginning is twice as long
_MOST = 65536  # beginnings


class Affinity(Generic[_Replica]):
    """Remembers the replica of each beginning of a prompt.

    It passes over a replica with more than `slack` requests beyond the least busy one."""

    def __init__(self, slack: float) -> None:
        self._slack = slack
        self._last: OrderedDict[int, _Replica] = OrderedDict()

    def ranked(self, prompt: str, requests: Mapping[_Replica, int]) -> list[_Replica]:
        """Return the replicas, the best first, equals in random order. `requests` counts each one's requests."""
        by_load = sorted(sample(list(requests), len(requests)), key=lambda replica: requests[replica])
        for beginning in reversed(_beginnings(prompt)):
            known = self._last.get(beginning)
            if known is not None and known in requests and requests[known] <= requests[by_load[0]] + self._slack:
                return [known, *(replica for replica in by_load if replica != known)]
        return by_load

    def sent(self, prompt: str, replica: _Replica) -> None:
        """Remember the `replica` that a prompt was sent to."""
        for beginning in _beginnings(prompt):
            self._last[beginning] = replica
            self._last.move_to_end(beginning)
        while len(self._last) > _MOST:
            self._last.popitem(last=False)


def _beginnings(prompt: str) -> list[int]:
    lengths, length = [], _SHORTEST
    while length <= len(prompt):
        lengths.append(length)
        length *= 2
    return [hash(prompt[:length]) for length in lengths]
