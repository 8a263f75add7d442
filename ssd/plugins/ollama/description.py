"""Describes a checkpoint by the facts that people choose models by."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ssd.errors import UsageError
from ssd.models.checkpoint import inspect
from ssd.models.gguf.tensors import gguf_files


class CheckpointDescription(NamedTuple):
    """A checkpoint's facts that people choose models by; `dtype` is that of most of its `nbytes`."""

    format: str = ""
    family: str = ""
    dtype: str = ""
    parameters: int = 0
    nbytes: int = 0


@cache
def described(directory: str) -> CheckpointDescription:
    """Describe a checkpoint; return an empty description of one that cannot be read."""
    try:
        model = inspect(Path(directory))
    except (UsageError, OSError):
        return CheckpointDescription()
    dtypes: Counter[str] = Counter()
    for tensor in model.tensors.values():
        dtypes[tensor.dtype] += tensor.nbytes
    parameters = sum(math.prod(tensor.shape) for tensor in model.tensors.values())
    format = "gguf" if gguf_files(model.directory) else "safetensors"
    return CheckpointDescription(
        format, model.config["model_type"], max(dtypes, key=dtypes.__getitem__, default=""), parameters, model.nbytes
    )
