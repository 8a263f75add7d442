"""What an attack is, where it is aimed, and which answers to it are right."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

PATIENCE_S = 60.0
"""Seconds that an attacker waits for an answer. After that there was none."""

NONE = "none"
"""The code of an answer that did not come."""

_BROKEN = {"internal_error", "engine_error", "engine_restarted"}


class Site(msgspec.Struct, frozen=True):
    """Where an engine listens: HTTP on `port` of this machine, ZeroMQ at `address` and, for clients with the keys in
    the folder `keys` of `ssd keys`, at `tcp`. `api_key` is the key that HTTP wants, "" where it wants none."""

    port: int
    address: str
    model: str
    tcp: str = ""
    keys: str = ""
    api_key: str = ""


class Answer(NamedTuple):
    """How a request ended: the status over HTTP, over ZeroMQ the code of the error or the reason of the end."""

    code: str
    reason: str


@dataclass(frozen=True)
class Outcome:
    """What an attack was told, by code, what of that was wrong, and how long it took."""

    codes: Counter[str]
    problems: list[str]
    seconds: float


Function = Callable[[Site], Iterable[Answer]]


@dataclass(frozen=True)
class Attack:
    """One way to harm others. `also` are codes that are right beside refusals."""

    name: str
    kind: str
    function: Function
    also: frozenset[str] = field(default_factory=frozenset)

    def run(self, site: Site) -> Outcome:
        """Never raises for what the engine does."""
        began = time.perf_counter()
        codes: Counter[str] = Counter()
        problems: list[str] = []
        try:
            for answer in self.function(site):
                codes[answer.code] += 1
                if not self._is_right(answer):
                    problems.append(f"{answer.code}: {answer.reason[:200]!r}")
        except Exception as error:  # what comes is what an engine under attack sends: it may be anything
            problems.append(f"{type(error).__name__}: {error}")
        return Outcome(codes, problems, time.perf_counter() - began)

    def _is_right(self, answer: Answer) -> bool:
        """A refusal has a reason, and is no breakdown."""
        if answer.code in self.also:
            return True
        if answer.code.isdigit():
            return bool(answer.reason) and (answer.code == "503" or 400 <= int(answer.code) < 500)
        return bool(answer.reason) and answer.code not in (NONE, *_BROKEN, "stop", "length", "abort")


ATTACKS: list[Attack] = []
"""Every attack on an engine with an honest model, in the order in which it is run."""


def attack(*also: str) -> Callable[[Function], Function]:
    """Register a function as an attack. It yields the answers that it gets, and raises AssertionError for what no
    answer shows. `also` are codes that are right beside refusals."""

    def add(function: Function) -> Function:
        kind = function.__module__.rpartition(".")[2]
        ATTACKS.append(Attack(function.__name__, kind, function, frozenset(also)))
        return function

    return add
