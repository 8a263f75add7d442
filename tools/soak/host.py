"""The engine of a soak, in a process of its own, so that its memory is not mixed with that of the load.

`python -m tools.soak.host` reads an `EngineConfig` as a line of JSON, starts the engine and prints its addresses as a
line of JSON. It serves until its input ends. The draft may die any number of times.
"""

from __future__ import annotations

import json
import math
import select
import sys

import msgspec

from ssd.config.engine import EngineConfig
from ssd.launch.restarts import Restarts
from ssd.launch.supervisor import Engine

_BACK_OFF_S = 0.1  # of the draft, however often it has died


def main() -> None:
    config = msgspec.json.decode(sys.stdin.readline(), type=EngineConfig)
    with Engine(config, draft_restarts=Restarts(per_minute=math.inf, longest=_BACK_OFF_S)) as engine:
        print(json.dumps({"address": engine.address, "url": engine.url}), flush=True)
        while not select.select([sys.stdin], [], [], 0.5)[0]:
            if engine.wait(0):
                raise engine.failure or SystemExit("the engine has stopped")


if __name__ == "__main__":
    main()
