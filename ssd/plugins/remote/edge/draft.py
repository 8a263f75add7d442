"""The draft of `ssd edge`, as a child of its supervisor."""

from __future__ import annotations

import logging

import torch

from ssd.ipc.process import Child
from ssd.ipc.trace_ring import State
from ssd.plugins.remote.configuration import RemoteDraft
from ssd.plugins.remote.drafter import RemoteDrafter

log = logging.getLogger("ssd.draft")


def main(child: Child) -> None:
    """Draft for the engine upstream; report ready once accepted, or after a failure that may pass."""
    config, upstream = child.config, child.config.upstream
    assert upstream is not None and config.draft is not None
    torch.set_grad_enabled(False)
    options = RemoteDraft(
        connect=upstream.draft_connect,
        keys=upstream.draft_keys,
        model=config.draft,
        name=config.draft_name,
        target=upstream.lender,
        formats=config.draft_formats,
        device=config.draft_device,
        cache_tokens=config.draft_num_pages * config.page_size,
        emulate=config.emulate,
    )

    said = False

    def settled(words: str) -> None:
        nonlocal said
        log.warning("%s", words)
        if not said:
            child.trace.enter(State.IDLE)
            child.ready()
        said = True

    RemoteDrafter(options, child.beat, settled, texts=True).serve()
