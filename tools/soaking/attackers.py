"""Who attacks during a soak, in a process of its own: one attack of `tests/attacks` after the other, in any order.

`python -m soaking.attackers SITE SEED` (a `Site` as JSON) prints one line of JSON for each attack that is over. It goes
on until it is killed.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]


class Over(msgspec.Struct):
    """One attack: its name and kind, the codes of the answers to it, and how long it took."""

    name: str
    kind: str
    codes: dict[str, int]
    seconds: float


@dataclass
class Attacked:
    """All attacks of a soak: how many of each kind, and what was answered by code."""

    kinds: Counter[str] = field(default_factory=Counter)
    names: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)

    @property
    def broken(self) -> int:
        """Answers that say that the engine has a bug."""
        return self.codes["500"] + self.codes["internal_error"]


async def attack(site: bytes, seed: int, attacked: Attacked) -> None:
    """Attack until this is cancelled. `site` is a `Site` as JSON."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tools")])
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "soaking.attackers", site.decode(), str(seed)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
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
