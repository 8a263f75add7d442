"""The draft of `ssd edge`, as a child of its supervisor."""

from __future__ import annotations

import logging

import torch

from ssd.ipc.process import Child
from ssd.ipc.trace_ring import State
from ssd.plugins.remote.drafter import RemoteDrafter

log = logging.getLogger("ssd.draft")


def main(child: Child) -> None:
    """Draft for the engine upstream; report ready once accepted, or after a failure that may pass."""
    torch.set_grad_enabled(False)
    said = False

    def settled(words: str) -> None:
        nonlocal said
        log.warning("%s", words)
        if not said:
            child.trace.enter(State.IDLE)
            child.ready()
        said = True

    RemoteDrafter(child.config, child.beat, settled, texts=True).serve()
