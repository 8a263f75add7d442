"""Many random faults of a draft on another machine: `python -m tests.plugins.remote.many_remote --faults 1000`.

Prints how many faults there were of each kind, and how many requests were lost or altered under them; exit status 1
if any was."""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

from tests.plugins.remote.world import World, kill

_LONGEST_STALL_S = 2.0
_BETWEEN_KILLS_S = 20.0  # of the receiver: after more than five deaths in a minute it stays off


class Faults:
    """Does a random fault to the world after each short while, in a thread, until there were `most`."""

    def __init__(self, world: World, most: int, seed: int) -> None:
        self._world, self._most, self._random = world, most, random.Random(seed)
        self.done: Counter[str] = Counter()
        self._stack = ExitStack()
        self._sent: list[bytes] = []
        self._killed_at = 0.0
        self._draft = self._stack.enter_context(world.draft())
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self._thread.join()
        self._stack.close()

    def _run(self) -> None:
        kinds = {
            "reset": (self._world.link.reset, 10),
            "stall": (lambda: self._world.link.stall(self._random.uniform(0.2, _LONGEST_STALL_S)), 4),
            "garbage": (self._garbage, 10),
            "stop": (self._stop, 4),
            "kill the draft": (self._kill, 1),
            "kill the receiver": (self._kill_receiver, 1),
        }
        names, weights = list(kinds), [weight for _, weight in kinds.values()]
        while self.done.total() < self._most:
            time.sleep(self._random.uniform(0.05, 0.4))
            (name,) = self._random.choices(names, weights)
            if name == "kill the receiver" and time.monotonic() < self._killed_at + _BETWEEN_KILLS_S:
                continue
            with suppress(KeyError, ProcessLookupError):  # the receiver is being replaced
                kinds[name][0]()
            self.done[name] += 1

    def _garbage(self) -> None:
        """Bytes of no handshake, some of them the same again."""
        where = urlsplit(self._world.bind)
        if not self._sent or self._random.random() < 0.5:
            self._sent.append(self._random.randbytes(self._random.choice((10, 64, 5000))))
        with suppress(OSError), socket.create_connection((where.hostname or "", where.port or 0), 1) as peer:
            peer.sendall(self._random.choice(self._sent))

    def _stop(self) -> None:
        os.kill(self._draft.pid, signal.SIGSTOP)
        time.sleep(self._random.uniform(0.1, 1.5))
        os.kill(self._draft.pid, signal.SIGCONT)

    def _kill_receiver(self) -> None:
        self._killed_at = time.monotonic()
        kill(self._world.engine.pids["draft"])

    def _kill(self) -> None:
        """Kill the draft; another one comes, which is not waited for."""
        self._draft.kill()
        self._draft.wait()
        self._draft = self._stack.enter_context(self._world.started())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ssd-faults-") as folder:
        world = World(Path(folder))
        with world.running():
            expected = {temperature: world.ids("ar", temperature)[0] for temperature in (0.0, 0.8)}
            faults = Faults(world, asked.faults, asked.seed)
            answers, hits, lost, altered = 0, 0, 0, 0
            while faults.running:
                for temperature, ids in expected.items():
                    try:
                        found, hit = world.ids(temperature=temperature)
                    except Exception as error:
                        print(f"lost: {error!r}", flush=True)
                        lost += len(ids)
                        continue
                    answers, hits = answers + len(found), hits + hit
                    altered += sum(one != other for one, other in zip(found, ids, strict=True))
            faults.close()
    print(f"{faults.done.total()} faults: {', '.join(f'{n} {kind}' for kind, n in sorted(faults.done.items()))}")
    print(f"{answers} answers, {hits} rounds with a hit, {lost} requests lost, {altered} altered")
    sys.exit(bool(lost or altered))


if __name__ == "__main__":
    main()
