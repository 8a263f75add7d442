"""Finds a checkpoint's quantised weights and their layouts, from its config and headers alone.

`quantization_config` in config.json names the method; the tensors tell the rest. Any other method, or one of these in
another number of bits, is refused by name. `ssd.models.dequantize` reads the numbers.

- `awq`, version gemm, 4 bits: `qweight` int32 [in, out / 8], `qzeros` [groups, out / 8], `scales` [groups, out].
- `gptq`, 2, 3, 4 or 8 bits, 32 numbers in as many words: `qweight` int32 [in / 32 * bits, out], `qzeros`
  [groups, out / 32 * bits] (a zero is stored less 1, in `gptq_v2` as it is), `scales` [groups, out], `g_idx` int32
  [in], the group of each input.
- `compressed-tensors`, `pack-quantized`, 4 or 8 bits: `weight_packed` int32 [out, in / n], `weight_scale`
  [out, groups], and optionally `weight_zero_point` int32 [out / n, groups] and `weight_g_idx` [in].
- `compressed-tensors`, `int-quantized`, 8 bits: `weight` int8 [out, in], `weight_scale`, `weight_zero_point` int8.
- `compressed-tensors`, `float-quantized`, `fp8` and `fbgemm_fp8`: `weight` FP8 E4M3 [out, in], `weight_scale` (or, in
  `fp8`, `weight_scale_inv`) for the tensor, for each output, or for blocks. `naive-quantized` is an older name of
  `float-quantized` and `int-quantized`.
- `mxfp4`, of gpt-oss, for experts: `weight_blocks` uint8 [out, groups, 16], two E2M1 numbers a byte, the first in its
  low bits, and `weight_scales` uint8 [out, groups], powers of two with the bias 127 (OCP Microscaling Formats, 1.0).
  `ssd.models.stacks` gives these names to the parts of a stack.

The weight is (integer - zero) * scale, or FP8 * scale. A group has `group_size` neighbouring inputs, unless `g_idx`
says which group each input is in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ssd.errors import UsageError
from ssd.models.header import TensorInfo

QUANTIZATION = "quantization_config"
"""The field of config.json that describes quantised weights."""
_COMPRESSED = "compressed-tensors"
_READ = f"awq, gptq, fp8, fbgemm_fp8, mxfp4 and {_COMPRESSED} are"
_REFUSED = ("output_activations", "kv_cache_scheme", "transform_config")
_FLOATS = ("F32", "F16", "BF16")
_ACTIVATIONS = ("input_scale", "input_zero_point", "activation_scale")
# Format of compressed-tensors -> types of its numbers, and their bits.
_NUMBERS: Mapping[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "pack-quantized": (("int",), (4, 8)),
    "int-quantized": (("int",), (8,)),
    "float-quantized": (("float",), (8,)),
    "naive-quantized": (("int", "float"), (8,)),
}
# Inputs of a group if a config does not say it; transformers' default.
_GROUP_SIZE = 128


@dataclass(frozen=True)
class QuantizedTensor(TensorInfo):
    """A weight of few bits under the name and shape [out, in] that models know.

    `parts`: its stored (name, header): `codes` and `scale`, optionally `zero` and `order` (the group of each input)."""

    layout: str
    """awq, gptq, gptq_v2, packed, int8, fp8 or mxfp4"""
    bits: int
    block: tuple[int, int]
    """Outputs and inputs that share a scale, if scales are for blocks; else (0, 0)."""
    zeros_differ: bool
    """True if, by config and headers, its groups may have different zeros."""
    in_order: bool
    """True if, by config and headers, a group has neighbouring inputs."""
    parts: Mapping[str, tuple[str, TensorInfo]]

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for _, info in self.parts.values())


@dataclass(frozen=True)
class _Scheme:
    """The settings of a `quantization_config` for all weights.

    `groups`: how many inputs share a scale, for each kind of weights; 0: all. `symmetric`: weights may lack zeros.
    `equal_zeros`: all zeros of a weight are equal. `ordered`: a group's inputs may be anywhere."""

    method: str
    bits: int = 8
    groups: frozenset[int] = frozenset((0,))
    block: tuple[int, int] = (0, 0)
    symmetric: bool = True
    equal_zeros: bool = False
    ordered: bool = False


def check_quantization(found: Any) -> None:
    """Raise UsageError, which names the first field that differs, unless `found` is a known config."""
    _scheme(found)


def _scheme(found: Any) -> _Scheme:
    if not isinstance(found, Mapping):
        raise UsageError("it is no object")
    match found.get("quant_method"):
        case "awq":
            _one_of(found, "version", ("gemm", "GEMM"), "gemm")
            _one_of(found, "backend", ("autoawq",), "autoawq")
            return _Scheme("awq", _one_of(found, "bits", (4,)), _group_sizes(found))
        case "gptq":
            _one_of(found, "is_marlin_format", (False,), False)
            _one_of(found, "pack_dtype", ("int32",), "int32")
            stored = _one_of(found, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
            bits, sizes = _one_of(found, "bits", (2, 3, 4, 8)), _group_sizes(found)
            equal, ordered = found.get("sym") is True, bool(found.get("desc_act"))
            return _Scheme(stored, bits, sizes, equal_zeros=equal, ordered=ordered)
        case "fp8":
            _one_of(found, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
            return _Scheme("fp8", block=_block(found, "weight_block_size"))
        case "fbgemm_fp8":
            return _Scheme("fp8")
        case "mxfp4":
            return _Scheme("mxfp4", 4)
        case "compressed-tensors":
            return _compressed(found)
        case method:
            raise UsageError(f"quant_method {method!r} is not read ({_READ})")


def _compressed(found: Mapping[str, Any]) -> _Scheme:
    _refuse_fields(found)
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise UsageError("config_groups is no object with groups")
    kinds = [_group(group, found) for group in groups.values()]
    packed = {weights["num_bits"] for kind, weights in kinds if kind == "pack-quantized"}
    blocks = {_block(weights, "block_structure") for _, weights in kinds if weights["strategy"] == "block"}
    if len(packed) > 1 or len(blocks) > 1:
        raise UsageError("config_groups have weights of different num_bits or block_structure")
    symmetric = any(weights.get("symmetric") is not False for _, weights in kinds)
    sizes = frozenset(_group_size(weights) if weights["strategy"] == "group" else 0 for _, weights in kinds)
    return _Scheme(_COMPRESSED, next(iter(packed), 8), sizes, next(iter(blocks), (0, 0)), symmetric=symmetric)


def _group_sizes(found: Mapping[str, Any]) -> frozenset[int]:
    dynamic = found.get("dynamic") or {}
    others = [part for part in dynamic.values() if isinstance(part, Mapping)] if isinstance(dynamic, Mapping) else []
    return frozenset(_group_size(part) for part in (found, *(part for part in others if "group_size" in part)))


def _group_size(found: Mapping[str, Any]) -> int:
    """Return how many inputs share a scale; 0: all."""
    match found.get("group_size"):
        case None:
            return _GROUP_SIZE
        case -1:
            return 0
        case int(size) if size > 0 and size is not True:
            return size
        case value:
            raise UsageError(f"group_size is {value!r}, not -1 or a positive number")


def _group(group: Any, found: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return format and `weights` of one of the config's groups; raise UsageError for unknown ones."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise UsageError("a part of it is no object")
    _refuse_fields(group)
    kind = _one_of(found if group.get("format") is None else group, "format", tuple(_NUMBERS))
    numbers, bits = _NUMBERS[kind]
    number = _one_of(weights, "type", numbers, "int")
    _one_of(weights, "num_bits", bits)
    _one_of(weights, "symmetric", (True,) if number == "float" else (True, False), True)
    _one_of(weights, "strategy", ("tensor", "channel", "block" if number == "float" else "group"))
    return kind, weights


def _refuse_fields(found: Mapping[str, Any]) -> None:
    for name in _REFUSED:
        if found.get(name):
            raise UsageError(f"it has {name}")
    sparsity = found.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format") == "dense"):
        raise UsageError("it has sparsity_config")


def _one_of(found: Mapping[str, Any], name: str, known: Sequence[Any], default: Any = None) -> Any:
    value = default if found.get(name) is None else found[name]
    if not any(type(value) is type(item) and value == item for item in known):
        raise UsageError(f"{name} is {value!r}, not {' or '.join(repr(item) for item in known)}")
    return value


def _block(found: Mapping[str, Any], name: str) -> tuple[int, int]:
    match found.get(name):
        case None:
            return 0, 0
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
        case value:
            raise UsageError(f"{name} is {value!r}, not two positive numbers")


def named(tensors: Mapping[str, TensorInfo], quantization: Any) -> dict[str, TensorInfo]:
    """Return a checkpoint's tensors with quantised weights under the names and shapes that models know.

    `quantization`: checked config, or None. Raises UsageError for parts that do not fit together."""
    if quantization is None:
        return dict(tensors)
    scheme, found = _scheme(quantization), dict(tensors)
    for name, info in tensors.items():
        module, _, last = name.rpartition(".")
        weight = f"{module}.weight"
        parts = _Parts(tensors, module, name, info)
        match scheme.method, last, info.dtype, len(info.shape):
            case "awq" | "gptq" | "gptq_v2", "qweight", _, _:
                quantized = parts.by_inputs(scheme)
            case "compressed-tensors", "weight_packed", _, _:
                quantized = parts.packed(scheme)
            case "mxfp4", "weight_blocks", _, _:
                quantized = parts.mxfp4(scheme)
            case "compressed-tensors", "weight", "I8", 2:
                quantized = parts.integers(scheme)
            case "compressed-tensors" | "fp8", "weight", "F8_E4M3", 2:
                quantized = parts.fp8(scheme)
            case _:
                continue
        if name != weight and weight in tensors:
            raise UsageError(f"there are both {weight} and {name}")
        for stored, _ in quantized.parts.values():
            found.pop(stored, None)
        for beside in ("weight_shape", "qzeros", "weight_g_idx", "weight_zero_point", *_ACTIVATIONS):
            found.pop(f"{module}.{beside}", None)
        found[weight] = quantized
    return found


class _Parts:
    """Collects and checks the tensors of one weight, whose integers are the tensor `name`."""

    def __init__(self, tensors: Mapping[str, TensorInfo], module: str, name: str, info: TensorInfo) -> None:
        self._tensors, self._module, self._name, self._info = tensors, module, name, info
        self._parts: dict[str, tuple[str, TensorInfo]] = {"codes": (name, info)}

    def by_inputs(self, scheme: _Scheme) -> QuantizedTensor:
        """Return a weight of AWQ or GPTQ, whose rows are inputs."""
        (rows, columns), bits = self._words(), scheme.bits
        awq, whole = scheme.method == "awq", 32 if bits == 3 else 32 // bits
        inputs, outputs = (rows, columns * 32 // bits) if awq else (rows * 32 // bits, columns)
        groups = self._add("scale", "scales", _FLOATS, (0, outputs)).shape[0]
        if outputs % whole or (inputs * bits % 32 and not awq):
            raise UsageError(f"tensor {self._name} is {outputs} x {inputs}, no multiples of {whole}")
        self._add("zero", "qzeros", ("I32",), (groups, outputs * bits // 32))
        if not awq:
            self._add("order", "g_idx", ("I32", "I64"), (inputs,), optional=True)
        if "order" not in self._parts:
            self._check_groups(inputs, groups, "scales", scheme)
        return self._weight(scheme.method, (outputs, inputs), scheme, in_order=not scheme.ordered)

    def packed(self, scheme: _Scheme) -> QuantizedTensor:
        outputs, words, in_a_word = *self._words(), 32 // scheme.bits
        inputs = words * in_a_word
        groups = self._add("scale", "weight_scale", _FLOATS, (outputs, 0)).shape[1]
        self._add("zero", "weight_zero_point", ("I32",), (-(-outputs // in_a_word), groups), scheme.symmetric)
        self._add("order", "weight_g_idx", ("I32", "I64"), (inputs,), optional=True)
        self._check_groups(inputs, groups, "weight_scale", scheme)
        return self._weight("packed", (outputs, inputs), scheme, in_order="order" not in self._parts)

    def integers(self, scheme: _Scheme) -> QuantizedTensor:
        outputs, inputs = self._info.shape
        scale = self._scale("weight_scale", (outputs, 0))
        self._add("zero", "weight_zero_point", ("I8",), scale.shape, scheme.symmetric)
        if len(scale.shape) == 2:
            self._check_groups(inputs, scale.shape[1], "weight_scale", scheme)
        return self._weight("int8", (outputs, inputs), scheme)

    def fp8(self, scheme: _Scheme) -> QuantizedTensor:
        (outputs, inputs), (rows, columns) = self._info.shape, scheme.block
        names = ("weight_scale_inv", "weight_scale") if scheme.method == "fp8" else ("weight_scale",)
        name = next((name for name in names if f"{self._module}.{name}" in self._tensors), names[0])
        self._scale(name, (-(-outputs // rows), -(-inputs // columns)) if rows else (outputs, 1))
        return self._weight("fp8", (outputs, inputs), scheme)

    def mxfp4(self, scheme: _Scheme) -> QuantizedTensor:
        if self._info.dtype != "U8" or len(self._info.shape) != 3 or self._info.shape[2] != 16:
            raise UsageError(f"tensor {self._name} must be blocks of 16 bytes, is {self._info.dtype}{self._info.shape}")
        outputs, groups, _ = self._info.shape
        self._add("scale", "weight_scales", ("U8",), (outputs, groups))
        return self._weight("mxfp4", (outputs, 32 * groups), scheme)

    def _words(self) -> tuple[int, int]:
        if self._info.dtype != "I32" or len(self._info.shape) != 2:
            raise UsageError(f"tensor {self._name} must be a matrix of I32, is {self._info.dtype}{self._info.shape}")
        return self._info.shape[0], self._info.shape[1]

    def _scale(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        info = self._tensors.get(f"{self._module}.{name}")
        one = info is not None and info.shape in ((), (1,))
        return self._add("scale", name, _FLOATS, info.shape if one and info is not None else shape)

    def _add(
        self, part: str, name: str, dtypes: Sequence[str], shape: tuple[int, ...], optional: bool = False
    ) -> TensorInfo:
        """Add a part beside the integers and return its header; for a missing optional part, the integers'.

        0 in `shape` allows any size but 0. Raises UsageError for a wrong or missing part."""
        name = f"{self._module}.{name}"
        if (info := self._tensors.get(name)) is None:
            if optional:
                return self._info
            raise UsageError(f"tensor {name} is missing, which {self._name} needs")
        fits = len(info.shape) == len(shape) and all(
            ours == theirs if theirs else ours for ours, theirs in zip(info.shape, shape, strict=True)
        )
        if info.dtype not in dtypes:
            raise UsageError(f"tensor {name} has type {info.dtype}, not {' or '.join(dtypes)}")
        if not fits:
            raise UsageError(
                f"tensor {name} of shape {info.shape} does not fit {self._name} of {self._info.shape}: expected "
                f"({', '.join(str(size or 'any') for size in shape)})"
            )
        self._parts[part] = name, info
        return info

    def _check_groups(self, inputs: int, groups: int, name: str, scheme: _Scheme) -> None:
        if not any(groups * (size or inputs) == inputs for size in scheme.groups):
            sizes = " or ".join(str(size or inputs) for size in sorted(scheme.groups))
            raise UsageError(
                f"tensor {self._module}.{name} does not fit {self._name}: {inputs} inputs are not {groups} groups of "
                f"{sizes}, the group_size of the config"
            )

    def _weight(self, layout: str, shape: tuple[int, int], scheme: _Scheme, in_order: bool = True) -> QuantizedTensor:
        bits, block = (8, scheme.block) if layout in ("int8", "fp8") else (scheme.bits, (0, 0))
        zeros = math.prod(self._parts["zero"][1].shape) if "zero" in self._parts else 0
        differ = zeros > 1 and not scheme.equal_zeros
        return QuantizedTensor(
            self._info.dtype, shape, self._info.file, layout, bits, block, differ, in_order, self._parts
        )
