"""The OLMo 3 family: OLMo 2 with windows in three of four layers. Only full layers scale rotation."""

from __future__ import annotations

from typing import ClassVar

from ssd.plugins.families.gemma3 import ByKind, rope
from ssd.plugins.families.olmo2 import OLMO_SPLITS, Olmo2
from ssd.system.fields import Config, number


class Olmo3(ByKind, Olmo2):
    slides = True
    defaults: ClassVar[Config] = {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4}
    splits = OLMO_SPLITS

    def rope(self, config: Config, kind: str) -> Config:
        theta = number(config, "rope_theta", 5e5)
        return rope({**config, "rope_theta": theta, "rope_local_base_freq": theta}, kind)
