"""The choice of a replica for a request: one with the prompt's beginning cached, unless too busy.

Unlike Ray's own router (`ray.serve.llm`), it has no state in an actor, which may be lost."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from random import sample
from typing import Any

_SHORTEST = 64  # characters; each further remembered beginning is twice as long
_MOST = 65536  # beginnings


class Affinity:
    """Remembers a prompt's replica by its beginnings; `slack`: requests beyond the least busy one's."""

    def __init__(self, slack: float) -> None:
        self._slack = slack
        self._last: OrderedDict[int, Any] = OrderedDict()

    def ranked(self, prompt: str, requests: Mapping[Any, int]) -> list[Any]:
        """Return the replicas, the best first, equals in random order. `requests`: each one's requests."""
        by_load = sorted(sample(list(requests), len(requests)), key=lambda replica: requests[replica])
        for beginning in reversed(_beginnings(prompt)):
            known = self._last.get(beginning)
            if known is not None and known in requests and requests[known] <= requests[by_load[0]] + self._slack:
                return [known, *(replica for replica in by_load if replica != known)]
        return by_load

    def sent(self, prompt: str, replica: Any) -> None:
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
