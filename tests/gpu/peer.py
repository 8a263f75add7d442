"""`python -m tests.gpu.peer`: another process with a shared tensor, told by lines of JSON what to do with it.

{"export": size}, or {"open": handle}, or {"descriptor": number, "size": size} for memory of the host, then any of
{"fill": value}, {"sum": 0} and {"scribble": 0}, which does not end. Answers by a line each.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import torch

from ssd.execution.runner import device_of
from ssd.ipc.arenas import Exported, HostTensor, Imported, settle
from ssd.ipc.messages import ArenaHandle
from tests.gpu.conftest import DEVICE


def opened(asked: dict[str, Any]) -> tuple[HostTensor | Exported | Imported, Any]:
    device = device_of(DEVICE)
    if "export" in asked:
        exported = Exported("shared", asked["export"], device)
        return exported, msgspec.to_builtins(exported.handle)
    if "open" in asked:
        return Imported(msgspec.convert(asked["open"], ArenaHandle), device), None
    return HostTensor(asked["descriptor"], asked["size"]), None


def main() -> None:
    shared, answer = opened(json.loads(input()))
    print(json.dumps(answer), flush=True)
    for line in sys.stdin:
        ((verb, value),) = json.loads(line).items()
        words = shared.data.view(torch.int64)
        if verb == "sum":
            answer = int(words.sum())
        else:
            words.fill_(value)
        settle(shared.data)
        print(json.dumps(answer), flush=True)
        while verb == "scribble":
            words += 1
            settle(shared.data)


if __name__ == "__main__":
    main()
