"""Quantised weights as `compressed-tensors` stores them. Two layouts are read; any other is refused.

- `int-quantized`, 8 bits: `X.weight` int8 [out, in], `X.weight_scale` float [out, 1].
- `pack-quantized`, 4 bits: `X.weight_packed` int32 [out, in / 8], eight numbers from -8 to 7, with 8 added, in each,
  the first in the lowest bits; `X.weight_scale` float [out, in / group]; `X.weight_shape` int64 [2].

The weight is the product of integers and scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from ssd.errors import UsageError
from ssd.models.header import PACKED_DTYPE, TensorInfo

QUANTIZATION, SCALE = "quantization_config", "_scale"
"""The field of config.json; what is added to the name of a weight for that of its scales."""
PACKED, SHAPE = "_packed", "_shape"
"""What is added to the name of a weight in 4 bits for those of its integers and of its shape."""
Bits = Literal[4, 8]
_METHOD = "compressed-tensors"
_FORMATS: Mapping[Bits, str] = {4: "pack-quantized", 8: "int-quantized"}
_STRATEGIES: Mapping[Bits, str] = {4: "group", 8: "channel"}
_NOTHING_ELSE = ("input_activations", "output_activations", "kv_cache_scheme", "sparsity_config", "transform_config")
_NOT_READ = (".weight_g_idx", ".weight_zero_point")
IN_A_WORD, ZERO = 8, 8
"""Numbers of 4 bits in a word of 32, and what is added to each."""


def quantization_config(bits: Bits, group: int | None = None) -> dict[str, Any]:
    """Return the `quantization_config` of a checkpoint whose linear layers all have this number of `bits`."""
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": _STRATEGIES[bits]}
    weights |= {"dynamic": False, "group_size": group}
    targets = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    described = {"quant_method": _METHOD, "format": _FORMATS[bits], "quantization_status": "compressed"}
    return {**described, "config_groups": {"group_0": targets}, "ignore": []}


def check_quantization(found: Any) -> None:
    """Raise UsageError, which names the first field that differs, unless `found` is a config of a layout above."""
    _check(found, {"quant_method": _METHOD}, {})
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise UsageError("config_groups is no object with groups")
    bits: Bits = 4 if found.get("format") == _FORMATS[4] else 8
    kind = {"format": _FORMATS[bits]}
    _check(found, kind, {})
    wanted = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": _STRATEGIES[bits]}
    for group in groups.values():
        _check(group, kind, kind)
        _check(group.get("weights"), wanted, {"type": "int", "symmetric": True})


def named(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return a checkpoint's tensors with weights in 4 bits under the names and shapes that models know.

    Raises UsageError for one whose integers and scales do not fit together, and for what orders or shifts them."""
    found = dict(tensors)
    for name, info in tensors.items():
        if name.endswith(_NOT_READ):
            raise UsageError(f"tensor {name}: groups in another order, or with zero points, are not read")
        if not name.endswith("weight" + PACKED):
            continue
        weight = name.removesuffix(PACKED)
        if weight in tensors:
            raise UsageError(f"there are both {weight} and {name}")
        scale = tensors.get(weight + SCALE)
        if info.dtype != "I32" or len(info.shape) != 2 or scale is None or len(scale.shape) != 2:
            raise UsageError(f"tensor {name} must be a matrix of I32, with a matrix {weight + SCALE}")
        outputs, inputs = info.shape[0], IN_A_WORD * info.shape[1]
        if scale.shape[0] != outputs or not scale.shape[1] or inputs % scale.shape[1]:
            raise UsageError(f"tensor {weight + SCALE} of shape {scale.shape} does not fit {name} of {info.shape}")
        found[weight] = replace(info, dtype=PACKED_DTYPE, shape=(outputs, inputs))
        del found[name]
        found.pop(weight + SHAPE, None)
    return found


def _check(found: Any, expected: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    if not isinstance(found, Mapping):
        raise UsageError("a part of it is no object")
    given = {**defaults} | {name: value for name, value in found.items() if value is not None}
    for name, value in expected.items():
        if type(given.get(name)) is not type(value) or given[name] != value:
            raise UsageError(f"{name} is {given.get(name)!r}, not {value!r}")
    for name in _NOTHING_ELSE:
        if given.get(name):
            raise UsageError(f"it has {name}")
