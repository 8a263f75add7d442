"""Weights in 8 bits as `compressed-tensors` stores them: `X.weight` int8 [out, in], `X.weight_scale` float [out, 1].

The weight is their product. What stores weights, activations or caches in any other way is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ssd.errors import UsageError

QUANTIZATION, SCALE = "quantization_config", "_scale"
"""The field of config.json; what is added to the name of a weight for that of its scales."""
_METHOD, _FORMAT = "compressed-tensors", "int-quantized"
_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_NOTHING_ELSE = ("input_activations", "output_activations", "kv_cache_scheme", "sparsity_config", "transform_config")


def int8_config() -> dict[str, Any]:
    """Return the `quantization_config` of a checkpoint with all linear layers in 8 bits."""
    weights = _WEIGHTS | {"dynamic": False, "group_size": None}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    described = {"quant_method": _METHOD, "format": _FORMAT, "quantization_status": "compressed"}
    return {**described, "config_groups": {"group_0": group}, "ignore": []}


def check_quantization(found: Any) -> None:
    """Raise UsageError, which names the first field that differs, unless `found` is a config of this layout."""
    _check(found, {"quant_method": _METHOD, "format": _FORMAT}, {})
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise UsageError("config_groups is no object with groups")
    for group in groups.values():
        _check(group, {"format": _FORMAT}, {"format": _FORMAT})
        _check(group.get("weights"), _WEIGHTS, {"type": "int", "symmetric": True})


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
