"""The configuration of a draft on another machine than its target (`ssd draft`)."""

from __future__ import annotations

import msgspec

from ssd.config.emulation import DeviceTimes
from ssd.config.engine import Positive, WeightFormat


class RemoteDraft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `ssd draft` tells its process. `model` and `target` are checkpoint directories.

    `target`: a copy of the target, which the draft may share tensors with; None where there is none. `keys` is the
    folder with its keys. Of several `formats` it takes the fastest. Its KV cache has room for `cache_tokens` tokens at
    most. For measurements `emulate` gives forwards these times."""

    connect: str
    model: str
    name: str
    target: str | None = None
    keys: str | None = None
    formats: tuple[WeightFormat, ...] = (WeightFormat(),)
    device: str = "cpu"
    cache_tokens: Positive = 2048
    emulate: DeviceTimes | None = None
