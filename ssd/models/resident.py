"""Computes the bytes of memory that a model's weights take, from its config and headers alone.

On a CPU quantised weights (`ssd.kernels.form`) and 16-bit numbers keep their bits. A float32 tensor takes half as much
if 16 bits hold all its numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

from ssd.kernels import build
from ssd.kernels.form import Form
from ssd.models import registry
from ssd.models.checkpoint import Checkpoint
from ssd.models.gguf.tensors import GgufTensor
from ssd.models.header import TensorInfo
from ssd.models.pairs import DRAFT_VOCAB, short_list
from ssd.models.quantization import QuantizedTensor
from ssd.models.sizes import ModelSizes, repeated, weights

Rounding = Literal["none", "int8", "light"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
GGUF_FORMS: Mapping[str, Form] = {
    "Q4_0": Form(4, 32, 1, 2),
    "Q4_1": Form(4, 32, 2, 2),
    "Q5_0": Form(6, 32, 1, 2),
    "Q5_1": Form(6, 32, 2, 2),
    "Q8_0": Form(8, 32, 1, 2),
    "Q2_K": Form(4, 16, 2, 1, 256),
    "Q3_K": Form(4, 16, 1, 1, 256),
    "Q4_K": Form(4, 32, 2, 1, 256),
    "Q5_K": Form(6, 32, 2, 1, 256),
    "Q6_K": Form(6, 16, 1, 1, 256),
    "IQ4_NL": Form(4, 32, 1, 2),
    "IQ4_XS": Form(4, 32, 1, 1, 256),
    "MXFP4": Form(4, 32, 1, 1),
}
"""GGUF's name of a type of blocks -> the form that its weights are packed in."""
# Types whose codes are names of larger ones, which a GPU has in 8 bits.
_NAMED = ("IQ4_NL", "IQ4_XS", "MXFP4")
# Types whose groups `ssd.kernels.groups.find_groups` finds in a weight that was transposed as floats.
_FOUND_AGAIN = ("Q4_0", "Q4_1", "Q8_0")
_LIGHT = Form(4, 32, 2, 1)  # of `ssd.kernels.groups.rounded_to_4_bits`, whose span is all inputs
_EMBEDDINGS, _OUTPUTS = ("embed_tokens.weight", "wte.weight"), "lm_head.weight"
# Layers that are stacked into one weight: all become floats if one of them is in floats.
_STACKS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def resident_bytes(model: Checkpoint, dtype: str, quantize: Rounding = "none") -> int:
    """Return an upper bound on the bytes of a model's weights in the memory of a CPU.

    `dtype`: float32, float16 or bfloat16. `quantize`: of linear layers; `light`: to 4 bits, with a short head."""
    int8, light = quantize != "none", quantize == "light"
    item, count = 4 if dtype == "float32" else 2, weights(model)
    if not model.tensors:  # random ones
        sizes = ModelSizes.of(model)
        return count + item * sizes.vocab_size * sizes.width if int8 else item * count
    if not registry.has_file(model):
        return item * count
    if light and (ids := short_list(model)):
        model = replace(model, config=model.config | {DRAFT_VOCAB: len(ids)})
    rule = _Rule(item, dtype == "float32" and build.expected(), int8, light)
    matrices = {name: info for name, info in model.tensors.items() if len(info.shape) == 2}
    embeddings = [name for name in matrices if name.endswith(_EMBEDDINGS)]
    outputs = next((name for name in matrices if name.endswith(_OUTPUTS)), embeddings[-1] if embeddings else None)
    total = sum(item * math.prod(info.shape) for name, info in model.tensors.items() if name not in matrices)
    for name, info in matrices.items():
        if name == outputs:
            total += _predicting(model, info, rule, name in embeddings and not rule.shares(info, dtype))
        elif name in embeddings:
            total += _rows(model, rule.table(info))
        elif all(rule.form(matrices[other]) is not None for other in _beside(name) if other in matrices):
            total += rule.linear(info)
        else:
            total += rule.dense(info)
    return total


def device_bytes(model: Checkpoint, item_bytes: int) -> int:
    """Return the bytes of a model's weights on a GPU, in a type of `item_bytes` unless they have few bits.

    Codes of few bits take 4 or 8 bits (`ssd.layers.quantized`), steps and offsets at most four bytes each."""
    if not model.tensors:
        return ModelSizes.of(model).parameters() * item_bytes

    def size(info: TensorInfo) -> int:
        count = math.prod(info.shape)
        if isinstance(info, GgufTensor) and not info.transposed and (form := GGUF_FORMS.get(info.dtype)) is not None:
            bits = 4 if form.bits == 4 and info.dtype not in _NAMED else 8
            return count * bits // 8 + 4 * form.heads * count // form.group
        if isinstance(info, QuantizedTensor) and info.in_order:
            bits = 8 if info.layout in ("fp8", "mxfp4") else max(4, info.bits)
            return count * bits // 8 + 8 * math.prod(info.parts["scale"][1].shape)
        return count * item_bytes

    return repeated(model) * item_bytes + sum(map(size, model.tensors.values()))


def _beside(name: str) -> list[str]:
    module, _, layer = name.removesuffix(".weight").rpartition(".")
    return [f"{module}.{other}.weight" for stack in _STACKS if layer in stack for other in stack if other != layer]


def _predicting(model: Checkpoint, info: TensorInfo, rule: _Rule, twice: bool) -> int:
    """Return the bytes of the last layer; `twice`: and of the embedding, a second copy of its tensor.

    If the layer predicts some ids only, a table has the rows of all ids, and is the embedding, too."""
    predicted = model.config.get(DRAFT_VOCAB)
    if type(predicted) is not int or predicted >= info.shape[0]:
        return rule.linear(info) + (rule.table(info) if twice else 0)
    return rule.linear(info, predicted) + _rows(model, rule.table(info, apart=True))


def _rows(model: Checkpoint, nbytes: int) -> int:
    ids = model.translation
    return nbytes if ids is None else nbytes * len(ids.own) // ids.known


class _Rule(NamedTuple):
    """Computes the bytes that a tensor takes in memory.

    `item`: bytes of a number in the model's type. `packs`: the type is float32, and our kernels run. `int8`: linear
    layers are rounded to 8 bits; if `light`, to 4."""

    item: int
    packs: bool
    int8: bool
    light: bool

    def linear(self, info: TensorInfo, outputs: int | None = None) -> int:
        """Return the bytes of a linear layer, or of its first `outputs`."""
        outputs, inputs = outputs or info.shape[0], info.shape[1]
        if isinstance(info, GgufTensor) and info.transposed:
            outputs, inputs = inputs, outputs
        form = self.form(info)
        as_it_is = form is not None and not (self.light and self.packs and form.bits > _LIGHT.bits)
        return form.nbytes(outputs, inputs) if as_it_is and form else self.dense(info, outputs, inputs)

    def dense(self, info: TensorInfo, outputs: int | None = None, inputs: int | None = None) -> int:
        """Return the bytes of a linear layer that is read as floats, or of its first `outputs`."""
        outputs, inputs = outputs or info.shape[0], inputs or info.shape[1]
        if self.light and self.packs and inputs % _LIGHT.group == 0:
            return _LIGHT._replace(span=inputs).nbytes(outputs, inputs)
        return Form(8, inputs, 1, 4).nbytes(outputs, inputs) if self.int8 else self._floats(info, outputs * inputs)

    def table(self, info: TensorInfo, apart: bool = False) -> int:
        """Return the bytes of a table; if `apart`, a row's numbers lie side by side, with codes in 8 bits."""
        rows, width = info.shape
        if (form := self.form(info)) is None:
            return self._floats(info, rows * width)
        return rows * (4 * form.heads * (width // form.group) + width) if apart else form.nbytes(rows, width)

    def shares(self, info: TensorInfo, dtype: str) -> bool:
        """Return True if the last layer and the embedding, one tensor, are in memory once."""
        return dtype == "float16" or (self.packs and (self.form(info) is not None or not self.int8))

    def form(self, info: TensorInfo) -> Form | None:
        """Return the form in which a tensor's bits are kept, or None if it becomes floats."""
        if not self.packs:
            return None
        if isinstance(info, GgufTensor):
            return None if info.transposed and info.dtype not in _FOUND_AGAIN else GGUF_FORMS.get(info.dtype)
        return _quantized(info) if isinstance(info, QuantizedTensor) else None

    def _floats(self, info: TensorInfo, count: int) -> int:
        return count * (2 if self.packs and info.dtype in ("BF16", "F16") else self.item)


def _quantized(info: QuantizedTensor) -> Form | None:
    scales = info.parts["scale"][1]
    if info.layout == "mxfp4":
        return GGUF_FORMS["MXFP4"]
    if info.layout == "fp8" or not info.in_order or (info.zeros_differ and scales.dtype == "F32"):
        return None
    by_inputs = info.layout in ("awq", "gptq", "gptq_v2")
    groups = 1 if len(scales.shape) < 2 else scales.shape[0 if by_inputs else 1]
    wide = info.zeros_differ or scales.dtype == "F32"  # offsets are products, which float16 does not hold
    return Form(4 if info.bits <= 4 else 8, info.shape[1] // groups, 1 + info.zeros_differ, 4 if wide else 2)
