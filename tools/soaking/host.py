"""The engine of a soak, in a process of its own: what the supervisor's thread keeps is not mixed with the load's.

`python -m soaking.host` reads an `EngineConfig` as one line of JSON, starts the engine and prints its addresses as one
line of JSON. It serves until its input ends. The draft may die as often as it likes.
"""

from __future__ import annotations

import json
import math
import select
import sys

import msgspec

from ssd.config import EngineConfig
from ssd.restarts import Restarts
from ssd.supervisor import Engine

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
