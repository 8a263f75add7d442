"""Where a model's tensors come from. A family asks by name and shape; it never sees files."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Container

import torch
from torch import Tensor

from ssd.errors import UsageError
from ssd.layers.linear import Linear
from ssd.models.checkpoint import Checkpoint

Reader = Callable[[str, tuple[int, ...]], Tensor]
LinearLayer = Callable[[Tensor], Tensor]
MakeLinear = Callable[[Tensor, Tensor | None], LinearLayer]
"""(weight [out, in], bias [out]) -> the layer, `ssd.layers.linear.Linear` or another of its kind."""


class Weights:
    """Tensors below a name prefix, read on demand and checked against the shape the family expects.

    `linear` makes the linear layers of a family out of them. `names` are those that exist; None: whatever is asked for.
    """

    def __init__(
        self, read: Reader, linear: MakeLinear = Linear, prefix: str = "", names: Container[str] | None = None
    ) -> None:
        self._read, self.linear, self._prefix, self._names = read, linear, prefix, names

    def __call__(self, name: str, *shape: int) -> Tensor:
        """The tensor `name`; raises `UsageError` when it is missing or shaped differently."""
        return self._read(self._prefix + name, shape)

    def below(self, prefix: str) -> Weights:
        return Weights(self._read, self.linear, f"{self._prefix}{prefix}.", self._names)

    def has(self, name: str) -> bool:
        return self._names is None or self._prefix + name in self._names


def from_checkpoint(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, linear: MakeLinear = Linear
) -> Weights:
    """Weights read from the checkpoint's safetensors files, memory-mapped, converted to `dtype` on `device`."""
    from safetensors import safe_open

    files: dict[str, object] = {}

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        info = checkpoint.tensors.get(name)
        if info is None:
            raise UsageError(f"tensor {name} is missing")
        if tuple(info.shape) != shape:
            raise UsageError(f"tensor {name} has shape {tuple(info.shape)}, expected {shape}")
        path = str(info.file)
        if path not in files:
            files[path] = safe_open(path, framework="pt")
        tensor: Tensor = files[path].get_tensor(name)  # type: ignore[attr-defined]
        return tensor.to(device, dtype)

    return Weights(read, linear, names=checkpoint.tensors)


def dummy(dtype: torch.dtype, device: torch.device, linear: MakeLinear = Linear) -> Weights:
    """Small random weights for `--load-format dummy`: the cost of a model without its checkpoint. The same name and
    shape give the same tensor in every process."""

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=device)
        return torch.randn(shape, generator=generator).mul_(0.02).to(device, dtype)

    return Weights(read, linear)
