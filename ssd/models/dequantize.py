"""Reads quantised weights (`ssd.models.quantization`): as integers in groups of inputs, or as float32."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd, nan
from typing import NamedTuple

import torch
from torch import Tensor

from ssd.errors import UsageError
from ssd.kernels.groups import Groups, exact_offsets
from ssd.models.quantization import QuantizedTensor

ReadPart = Callable[[str], Tensor]
"""Name of a tensor -> the tensor, read from its file."""
# Each of eight outputs -> its place in an AWQ word, which holds the outputs 0, 2, 4, 6, 1, 3, 5, 7 in this order.
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
E2M1_ZERO = 12
E2M1 = tuple(E2M1_ZERO + sign * twice for sign in (1, -1) for twice in (0, 1, 2, 3, 4, 6, 8, 12))
"""A number of 4 bits, E2M1 -> twice the number as a code with the zero `E2M1_ZERO`."""
HALF_SCALES = (*(2.0 ** (power - 128) for power in range(255)), nan)
"""A scale of 8 bits, E8M0 -> half of it, which goes with twice the numbers."""


class _Numbers(NamedTuple):
    """A weight's codes uint8 [out, in]; steps float32 and zeros int64, which broadcast to [out, groups]."""

    codes: Tensor
    steps: Tensor
    zeros: Tensor


def quantized_groups(tensor: QuantizedTensor, read: ReadPart, fp8: bool = False) -> Groups | None:
    """Return a weight as `Groups` equal to `quantized_floats` bit for bit.

    None if the groups' inputs are not in order, if float32 cannot hold scale times zero, and for FP8 unless `fp8`."""
    if tensor.layout == "fp8":
        return _fp8_groups(tensor, read) if fp8 else None
    if _order(tensor, read) is not None:
        return None
    codes, steps, zeros = _numbers(tensor, read)
    steps = steps.expand(codes.shape[0], -1)
    if int(zeros.min()) == int(zeros.max()):
        return Groups(codes, steps, None, int(zeros[0, 0]))
    offsets = exact_offsets(zeros, steps)
    return None if offsets is None else Groups(codes, steps, offsets)


def quantized_floats(tensor: QuantizedTensor, read: ReadPart) -> Tensor:
    """Return the weight as float32 [out, in], each number rounded once."""
    if tensor.layout == "fp8":
        return _fp8_groups(tensor, read).dequantized()
    codes, steps, zeros = _numbers(tensor, read)
    order = _order(tensor, read)
    if order is None:
        order = torch.arange(steps.shape[1]).repeat_interleave(codes.shape[1] // steps.shape[1])
    zeros = zeros.expand(zeros.shape[0], steps.shape[1])
    return (codes.float() - zeros.float()[:, order]) * steps[:, order]


def _order(tensor: QuantizedTensor, read: ReadPart) -> Tensor | None:
    """Return the group of each input, int64 [in], or None if groups are of neighbouring inputs, in order."""
    if "order" not in tensor.parts:
        return None
    name = tensor.parts["order"][0]
    order, inputs = read(name).long(), tensor.shape[1]
    scales = tensor.parts["scale"][1].shape
    groups = scales[1] if tensor.layout == "packed" else scales[0]
    if tensor.layout == "packed" and bool((order == -1).all()):
        return None  # the library's mark for "not used"
    if int(order.min()) < 0 or int(order.max()) >= groups:
        raise UsageError(f"tensor {name} names groups beyond the {groups} that there are")
    neighbours = inputs % groups == 0 and torch.equal(order, torch.arange(inputs) // (inputs // groups))
    return None if neighbours else order


def _numbers(tensor: QuantizedTensor, read: ReadPart) -> _Numbers:
    parts = {part: read(name) for part, (name, _) in tensor.parts.items() if part != "order"}
    codes, scales, zeros, bits = parts["codes"], parts["scale"].float(), parts.get("zero"), tensor.bits
    middle = torch.tensor([[1 << (bits - 1)]])
    match tensor.layout:
        case "awq":
            return _Numbers(_awq(codes).T.contiguous(), scales.T, _awq(parts["zero"]).T.long())
        case "gptq" | "gptq_v2":
            found = _unpacked(parts["zero"], bits).T.long()
            if tensor.layout == "gptq":
                found = _one_more(found, bits, tensor.parts["zero"][0])
            return _Numbers(_unpacked(codes.T, bits), scales.T, found)
        case "packed":
            found = middle if zeros is None else _unpacked(zeros.T, bits)[:, : tensor.shape[0]].T.long()
            return _Numbers(_unpacked(codes, bits), scales, found)
        case "mxfp4":
            steps, names = torch.tensor(HALF_SCALES)[parts["scale"].int()], _unpacked(codes.flatten(1), 4)
            if steps.isnan().any():
                raise UsageError(f"tensor {tensor.parts['scale'][0]} has a scale that is not finite")
            return _Numbers(torch.tensor(E2M1, dtype=torch.uint8)[names.int()], steps, torch.tensor([[E2M1_ZERO]]))
        case _:
            scales = scales if scales.ndim == 2 else scales.reshape(1, 1)
            found = middle if zeros is None else zeros.long().reshape(scales.shape) + 128
            return _Numbers(codes.view(torch.uint8) ^ 128, scales, found)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 [n, words] into uint8 [n, numbers], lowest bits first; 3 bits may lie in two words."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    if bits == 3:  # eight numbers in three octets
        low, middle, high = octets.view(len(octets), -1, 3).int().unbind(-1)
        together, shifts = low | middle << 8 | high << 16, range(0, 24, 3)
    else:
        together, shifts = octets, range(0, 8, bits)
    most = (1 << bits) - 1
    return torch.stack([(together >> shift & most).to(torch.uint8) for shift in shifts], dim=-1).flatten(1)


def _awq(words: Tensor) -> Tensor:
    return _unpacked(words, 4).unflatten(1, (-1, 8))[..., _AWQ_PLACES].flatten(1)


def _one_more(stored: Tensor, bits: int, name: str) -> Tensor:
    """Return the zeros of GPTQ's first format, which stores each less 1.

    Raises UsageError for the largest number of `bits`, which libraries read in three ways."""
    if int(stored.max()) == (most := (1 << bits) - 1):
        raise UsageError(
            f"tensor {name} stores a zero as {most}, which stands for 0 or for {most + 1}: the format gptq cannot say "
            "which; gptq_v2 can"
        )
    return stored + 1


def _fp8_groups(tensor: QuantizedTensor, read: ReadPart) -> Groups:
    """Return FP8 weights as `Groups`, of the largest size that divides a block's width and the row's."""
    codes, scales = (read(tensor.parts[part][0]) for part in ("codes", "scale"))
    (outputs, inputs), scales = tensor.shape, scales.float()
    scales = scales if scales.ndim == 2 else scales.reshape(1, 1)
    if scales.numel() > 1 and tensor.block[0]:
        rows, columns = (min(size, whole) for size, whole in zip(tensor.block, tensor.shape, strict=True))
        group = gcd(columns, inputs)
        blocks = torch.arange(0, inputs, group) // columns
        scales = scales.repeat_interleave(rows, 0)[:outputs, blocks]
    return Groups(codes.view(torch.uint8), scales.expand(outputs, -1), None, e4m3=True)
