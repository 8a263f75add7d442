"""Defaults of the engine's options that depend on the device alone."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import msgspec

from ssd.config import gpus
from ssd.launch.options import ChosenOptions, EngineOptions, within_bounds

# From this compute capability on a GPU multiplies bfloat16 (Ampere).
_BFLOAT16 = (8, 0)
# A GPU with this much memory takes more requests and longer steps. vLLM draws the line at 70 GiB.
_LARGE_BYTES = 64 * 2**30
_OF_CPU = {"dtype": "float32", "draft_device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 256}
_OF_GPU = {"max_num_seqs": 32, "max_num_batched_tokens": 2048}
_OF_LARGE_GPU = {"max_num_seqs": 64, "max_num_batched_tokens": 8192}


def chosen(options: EngineOptions) -> ChosenOptions:
    """Return the options with a default for each that was not given. Raises UsageError for values out of bounds.

    On a CPU the numbers are small, because steps are slow. On a GPU weights are in bfloat16, and prompts go through
    flash-attn if it is installed. The draft then runs on a GPU too: the first one that the target leaves free, or else
    the target's."""
    ranks = gpus.of_ranks(options.device, options.ranks_here)
    found: dict[str, Any] = dict(_OF_CPU)
    if ranks:
        present = gpus.present() or []
        mine = present[ranks[0]] if ranks[0] < len(present) else None
        free = [number for number in range(len(present)) if number not in ranks]
        found = dict(_OF_LARGE_GPU if mine is not None and mine.total >= _LARGE_BYTES else _OF_GPU)
        is_old = mine is not None and mine.capability < _BFLOAT16
        found |= {"dtype": "float16" if is_old else "bfloat16", "draft_device": f"cuda:{(free or ranks)[0]}"}
    asked = {name: value for name, value in msgspec.structs.asdict(options).items() if value is not None}
    wanted = within_bounds(ChosenOptions(**(found | asked)))
    flash = ranks and wanted.attention == "auto" and wanted.dtype != "float32" and not wanted.deterministic
    if flash and find_spec("flash_attn") is not None and find_spec("triton") is not None:
        return msgspec.structs.replace(wanted, attention="flash-attn")
    return wanted
