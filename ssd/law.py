"""The numbers by which a token is drawn from logits: their names, bounds, defaults and order on a device.

Requests, messages and kernels take them from here: docs/design.md, "A number of a draw"."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_SEED = 2**63 - 1

Share = Annotated[float, Meta(ge=0, le=1)]
Seed = Annotated[int, Meta(ge=0, le=MAX_SEED)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
TopK = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TopP = Annotated[float, Meta(gt=0, le=1)]


class DrawParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The numbers of a draw but the seed. Temperature 0 is greedy; top_k 0, top_p 1, min_p 0 switch a filter off."""

    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: Share = 0.0


class DrawDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine's defaults of `DrawParams`, with the help of their options; None keeps the default there."""

    temperature: Annotated[Temperature | None, "0 is greedy. Default: the model's own, or 0."] = None
    top_k: Annotated[TopK | None, "Sample from the K likeliest tokens; 0: all. Default: the model's."] = None
    top_p: Annotated[TopP | None, "Sample from the likeliest tokens with this share. Default: the model's."] = None
    min_p: Annotated[Share | None, "Drop tokens below this share of the likeliest. Default: the model's."] = None


DRAWN = DrawParams.__struct_fields__
"""The order of a law's numbers on a device, without the seed; `temperature` is its inverse there, 0 if greedy."""


class Law(DrawParams, frozen=True, array_like=True):
    """The distribution and the noise that the tokens of a request are drawn by."""

    seed: Seed = 0

    @property
    def filters(self) -> bool:
        return self.temperature > 0.0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    def with_seed(self, seed: int) -> Law:
        return msgspec.structs.replace(self, seed=seed)
