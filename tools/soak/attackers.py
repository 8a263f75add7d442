"""Runs the attacks of `tests/attacks` during a soak, one after the other in random order, in a process of its own.

`python -m tools.soak.attackers SITE SEED` (a `Site` as JSON) prints one line of JSON after each attack. It runs until
it is killed.
"""

from __future__ import annotations

import asyncio
import random
import resource
import sys
from collections import Counter
from dataclasses import dataclass, field

import msgspec

from tools.processes import command, environment


class Over(msgspec.Struct):
    """An attack that is over: its name and kind, the codes of the answers to it, and its duration."""

    name: str
    kind: str
    codes: dict[str, int]
    seconds: float


@dataclass
class Attacked:
    """All attacks of a soak: how many of each kind, and the answers by code."""

    kinds: Counter[str] = field(default_factory=Counter)
    names: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)

    @property
    def broken(self) -> int:
        """Return how many answers say that the engine has a bug."""
        return self.codes["500"] + self.codes["internal_error"]


async def attack(site: bytes, seed: int, attacked: Attacked) -> None:
    """Attack until this is cancelled. `site` is a `Site` as JSON."""
    process = await asyncio.create_subprocess_exec(
        *command("tools.soak.attackers", site.decode(), str(seed)),
        stdout=asyncio.subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    try:
        async for line in process.stdout:
            over = msgspec.json.decode(line, type=Over)
            attacked.kinds[over.kind] += 1
            attacked.names[over.name] += 1
            attacked.codes.update(over.codes)
        raise AssertionError(f"the attackers have ended with status {await process.wait()}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def main() -> None:
    from tests.attacks.corpus import ATTACKS
    from tests.attacks.registry import Site

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    site, dice = msgspec.json.decode(sys.argv[1], type=Site), random.Random(int(sys.argv[2]))
    while True:
        for one in dice.sample(ATTACKS, len(ATTACKS)):
            outcome = one.run(site)
            over = Over(one.name, one.kind, dict(outcome.codes), outcome.seconds)
            print(msgspec.json.encode(over).decode(), flush=True)


if __name__ == "__main__":
    main()
