"""What rank 0 of the target tells the others before every forward, as `ssd.ipc.messages` has it: bounded, no pickle."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ssd.ipc.messages import Count, Message, Tokens
from ssd.params import Seed

Slot = Annotated[int, Meta(ge=0, le=65535)]
Page = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Pages = Annotated[list[Page], Meta(max_length=2**20)]
Temperature = Annotated[float, Meta(ge=0, le=100)]


class RowStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A row (`ssd.execution.batch.Row`). Its page table is the first `kept` pages of the one that its slot had before,
    and then `pages`."""

    slot: Slot
    start: Count
    token_ids: Tokens
    outputs: Count
    kept: Count
    pages: Pages


class RankStep(Message, frozen=True):
    """A forward over `rows`. `laws` are a temperature and a seed for each: sample; None: the logits are wanted."""

    rows: Annotated[list[RowStep], Meta(max_length=65536)]
    laws: Annotated[list[tuple[Temperature, Seed]], Meta(max_length=65536)] | None


RANK_STEP = msgspec.msgpack.Decoder(RankStep)
