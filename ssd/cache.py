"""Where files are kept that can be had again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$SSD_CACHE`, else `$XDG_CACHE_HOME/ssd`, else `~/.cache/ssd`; not created here."""
    if own := os.environ.get("SSD_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ssd"
