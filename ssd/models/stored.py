"""Reads the tensors of a checkpoint's files: safetensors, GGUF, and weights of few bits in either."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ssd.errors import UsageError
from ssd.kernels.gpu import fuses
from ssd.kernels.groups import Groups
from ssd.models.checkpoint import Checkpoint, TensorInfo
from ssd.models.dequantize import quantized_floats, quantized_groups
from ssd.models.gguf.header import FLOATS
from ssd.models.gguf.tensors import GgufTensor
from ssd.models.quantization import QuantizedTensor
from ssd.models.split import Piece
from ssd.models.stacks import ExpertTensor

_TYPES = ("F32", "F16", "BF16", "F64")

Progress = Callable[[int, int], None]
"""(bytes of the weights that have been read, bytes in all)"""


def check_type(name: str, tensor: TensorInfo) -> None:
    """Raise `UsageError` for quantised weights, which mean nothing without their scales."""
    if tensor.dtype not in _TYPES:
        known = ", ".join(_TYPES)
        raise UsageError(f"tensor {name} has type {tensor.dtype}: quantised weights are not read ({known} are)")


def check_shape(name: str, tensor: TensorInfo, shape: tuple[int, ...]) -> None:
    """Raise `UsageError` if a tensor has another shape than its family expects."""
    if tuple(tensor.shape) != shape:
        raise UsageError(f"tensor {name} has shape {tuple(tensor.shape)}, expected {shape}")


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise `UsageError` for a weight that is NaN or infinite in the type it is used in."""
    if tensor.numel() and not torch.stack(tensor.aminmax()).isfinite().all():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise UsageError(f"tensor {name} holds numbers that are not finite in {kind}")


class StoredTensors:
    """Reads tensors, or pieces, as `dtype` on `device`. `progress` is called after each tensor."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, ranks: int, progress: Progress
    ) -> None:
        self._tensors, self._dtype, self._device, self._progress = checkpoint.tensors, dtype, device, progress
        self._files: dict[str, Any] = {}
        self._done, self._total = 0, sum(tensor.nbytes for tensor in checkpoint.tensors.values()) // ranks

    def floats(self, name: str, shape: tuple[int, ...], piece: Piece | None = None) -> Tensor:
        """Return a tensor of finite numbers, dequantised if the checkpoint has it in few bits."""
        info = self._tensors.get(name)
        if (groups := self._quantised(name, shape)) is not None:
            tensor = groups.dequantized()
            tensor = (tensor.t() if isinstance(info, GgufTensor) and info.transposed else tensor)[piece or ...]
        elif isinstance(info, QuantizedTensor):
            tensor = quantized_floats(info, self._parts(info))[piece or ...].to(self._device, self._dtype)
        else:
            if info is not None:
                check_type(name, info)
            tensor = self.raw(name, shape, piece).to(self._device, self._dtype)
        check_finite(name, tensor)
        return tensor

    def groups(self, name: str, shape: tuple[int, ...], piece: Piece) -> Groups | None:
        """Return a weight of few bits as it is stored, if kernels compute with it here; None for others."""
        packed = fuses(self._device)
        if not packed and (self._dtype != torch.float32 or self._device.type != "cpu"):
            return None
        groups = self._quantised(name, shape)
        if groups is not None and packed:
            groups = groups.uncut(piece)
        return None if groups is None else groups[piece]

    def raw(self, name: str, shape: tuple[int, ...], piece: Piece | None = None) -> Tensor:
        """Return a tensor in the type of the file, on the CPU."""
        info = self._tensors.get(name)
        if info is None:
            raise UsageError(f"tensor {name} is missing")
        check_shape(name, info, shape)
        if isinstance(info, GgufTensor):
            tensor = info.floats()[piece or ...]
        else:
            tensor = self._read(name, info, piece)
        self._have_read(tensor.nbytes)
        return tensor

    def _quantised(self, name: str, shape: tuple[int, ...]) -> Groups | None:
        """Return a weight of few bits on the device; None if groups do not express it."""
        info = self._tensors.get(name)
        if isinstance(info, GgufTensor) and info.dtype not in FLOATS:
            check_shape(name, info, shape)
            groups = info.groups()
            for part in groups.heads:
                check_finite(name, part)
            self._have_read(info.nbytes)
        elif isinstance(info, QuantizedTensor):
            check_shape(name, info, shape)
            found = quantized_groups(info, self._parts(info), fp8=fuses(self._device))
            if found is None:
                return None
            groups = found
            if groups.e4m3 and bool(((groups.codes & 127) == 127).any()):
                raise UsageError(f"tensor {name} holds numbers that are not finite in float32")
        else:
            return None
        return replace(groups.map(lambda part: part.to(self._device)), dtype=self._dtype)

    def _parts(self, info: QuantizedTensor) -> Callable[[str], Tensor]:
        headers = dict(info.parts.values())

        def part(stored_name: str) -> Tensor:
            header = headers[stored_name]
            tensor = self._read(stored_name, header)
            self._have_read(header.nbytes)
            if header.dtype in _TYPES:
                check_finite(stored_name, tensor)
            return tensor

        return part

    def _read(self, name: str, info: TensorInfo, piece: Piece | None = None) -> Tensor:
        file = self._opened(info)
        if isinstance(info, ExpertTensor):
            return info.of(file.get_slice(info.stack))[piece or ...]
        name = info.stored or name
        tensor: Tensor = file.get_tensor(name) if piece is None else file.get_slice(name)[piece]
        return tensor

    def _opened(self, info: TensorInfo) -> Any:
        from safetensors import SafetensorError, safe_open

        path = str(info.file)
        if path not in self._files:
            try:
                self._files[path] = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise UsageError(f"cannot read {path}: {error}") from None
        return self._files[path]

    def _have_read(self, nbytes: int) -> None:
        # Every rank reads tensors that are not split, and a tied one is read twice.
        self._done = min(self._total, self._done + nbytes)
        self._progress(self._done, self._total)
