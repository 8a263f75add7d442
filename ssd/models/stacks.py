"""Finds the experts that a checkpoint stacks in one tensor: each becomes a tensor of its own.

`experts.gate_up_proj` [experts, 2 * inner, in] has the outputs of gate, then of up; `experts.down_proj` is [experts,
out, in]. In gpt-oss they are [experts, in, out], gate and up by turns, with `_bias` [experts, out]; MXFP4 has `_blocks`
uint8 [experts, out, groups, 16] and `_scales` uint8 [experts, out, groups]."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ssd.errors import UsageError
from ssd.models.header import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

_BY_TURNS = ("gpt_oss",)
"""The families (`model_type`) that stack gate and up by turns, and weights with their inputs first."""
_MOST = 4096  # experts
_STACK = re.compile(r"(.+\.experts)\.(gate_up|down)_proj(|_bias|_blocks|_scales)")
# End of a stack's name -> dimensions of the stack, and the end of a tensor's name.
_KINDS = {"": (3, "weight"), "_bias": (2, "bias"), "_blocks": (4, "weight_blocks"), "_scales": (3, "weight_scales")}


@dataclass(frozen=True)
class ExpertTensor(TensorInfo):
    """An expert's part of the tensor `stack`; its dimension of outputs is last if `transposed`."""

    stack: str
    expert: int
    outputs: slice
    transposed: bool

    def of(self, stack: Any) -> Tensor:
        whole: Tensor = stack[self.expert]
        return whole[:, self.outputs].t().contiguous() if self.transposed else whole[self.outputs]


def unstacked(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """Return the tensors of a checkpoint with those of each expert in place of their stacks.

    `experts.gate_up_proj` becomes `experts.0.gate_proj.weight`, ... Raises UsageError for a wrong number of experts."""
    found, by_turns = dict[str, TensorInfo](), config.get("model_type") in _BY_TURNS
    for name, info in tensors.items():
        if (match := _STACK.fullmatch(name)) is None:
            found[name] = info
            continue
        experts, layer, kind = match.groups()
        dimensions, last = _KINDS[kind]
        if len(info.shape) != dimensions or info.shape[0] != config.get("num_experts") or info.shape[0] > _MOST:
            raise UsageError(
                f"tensor {name} of shape {info.shape} is not a stack of {config.get('num_experts')} experts"
            )
        transposed = by_turns and last == "weight"
        shape = info.shape[:0:-1] if transposed else info.shape[1:]
        for part, outputs in _parts(layer, shape[0], by_turns).items():
            size = len(range(shape[0])[outputs]), *shape[1:]
            for expert in range(info.shape[0]):
                found[f"{experts}.{expert}.{part}.{last}"] = ExpertTensor(
                    info.dtype, size, info.file, name, expert, outputs, transposed
                )
    return found


def _parts(layer: str, outputs: int, by_turns: bool) -> dict[str, slice]:
    if layer == "down":
        return {"down_proj": slice(None)}
    if by_turns:
        return {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
    return {"gate_proj": slice(0, outputs // 2), "up_proj": slice(outputs // 2, None)}
