"""Drafts on other machines: speed by round trip, and how many clients a target serves at a speed each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ssd.speculation.theory import Cost
from ssd.tuning.estimates import Measurements
from ssd.tuning.predictor import best_fan_out, predicted, predicted_plain, predicted_sd
from tools.simulate.link import over_link

_TOKENS, _LEAST_TOKENS = 8192, 512  # that are simulated: of all texts, and of each
_MOST_CLIENTS = 256


class Capacity(NamedTuple):
    """How many clients a target serves with drafts at `place`, each at the speed that is asked for, and that speed
    alone."""

    place: str
    clients: int
    alone: float


def capacities(
    pair: Measurements, speed: float, lookahead: int, fan_out: int, rtts: tuple[float, ...], edge_step: Cost
) -> list[Capacity]:
    """Return the capacity of every place of the drafts at `speed` tok/s for each client.

    In the cloud one draft serves all clients; at the edge each client has a draft with steps of `edge_step`."""
    fan_outs = best_fan_out(pair, lookahead, fan_out * (lookahead + 1))
    edge = replace(pair, step=edge_step)

    def at_edge(rtt: float) -> Callable[[int], float]:
        def speed_of(clients: int) -> float:
            tokens = max(_LEAST_TOKENS, _TOKENS // clients)
            return over_link(edge, rtt, lookahead, (fan_out,), clients, tokens).speed

        return speed_of

    places: dict[str, Callable[[int], float]] = {
        "no draft": lambda clients: predicted_plain(pair, clients) / clients,
        "sd, in the cloud": lambda clients: predicted_sd(pair, clients, lookahead) / clients,
        "ssd, in the cloud": lambda clients: predicted(pair, clients, lookahead, fan_outs) / clients,
    }
    places |= {f"ssd, {1000 * rtt:g} ms away": at_edge(rtt) for rtt in rtts}
    return [Capacity(place, most_clients(found, speed), found(1)) for place, found in places.items()]


def most_clients(speed_of: Callable[[int], float], speed: float) -> int:
    """Return the most clients, up to `_MOST_CLIENTS`, at which each has the `speed`; it falls with them."""
    if speed_of(1) < speed:
        return 0
    low, high = 1, 2
    while high <= _MOST_CLIENTS and speed_of(high) >= speed:
        low, high = high, 2 * high
    high = min(high, _MOST_CLIENTS + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if speed_of(middle) >= speed else (low, middle)
    return low
