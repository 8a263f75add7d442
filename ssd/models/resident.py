"""Adds up the bytes of memory that a model's weights take, from its config and headers alone.

On a CPU quantised weights (`ssd.kernels.form`) and 16-bit numbers keep their bits. A float32 tensor takes half as much
if 16 bits hold all its numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, get_args

from ssd.kernels import build
from ssd.kernels.form import Form
from ssd.models import registry
from ssd.models.checkpoint import Checkpoint
from ssd.models.draft_kinds import draft_kind
from ssd.models.gguf.header import GGUF_FORMS
from ssd.models.gguf.tensors import GgufTensor
from ssd.models.header import TensorInfo
from ssd.models.pairs import DRAFT_VOCAB, short_list
from ssd.models.quantization import QuantizedTensor
from ssd.models.sizes import ModelSizes, weights

Rounding = Literal["none", "int8", "light"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
# Types whose codes are names of larger ones, which a GPU has in 8 bits.
_NAMED = ("IQ4_NL", "IQ4_XS", "MXFP4")
# Types whose groups `ssd.kernels.groups.find_groups` finds in a weight that was transposed as floats.
_FOUND_AGAIN = ("Q4_0", "Q4_1", "Q8_0")
_LIGHT = Form(4, 32, 2, 1)  # of `ssd.kernels.groups.rounded_to_4_bits`, whose span is all inputs
# Layers that are stacked into one weight: all become floats if one of them is in floats.
_STACKS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_EMBEDDINGS, _OUTPUTS = ("embed_tokens.weight", "wte.weight"), "lm_head.weight"


def resident_bytes(model: Checkpoint, dtype: str, quantize: Rounding = "none") -> int:
    """Return an upper bound on the bytes of a model's weights in the memory of a CPU.

    `dtype`: float32, float16 or bfloat16. `quantize`: of linear layers; `light`: to 4 bits, with a short head."""
    item, count = 4 if dtype == "float32" else 2, weights(model)
    if not model.tensors:  # random ones
        sizes = ModelSizes.of(model)
        return item * count if quantize == "none" else count + item * sizes.vocab_size * sizes.width
    if not registry.has_file(model):
        return item * count
    if quantize == "light" and (ids := short_list(model)):
        model = replace(model, config=model.config | {DRAFT_VOCAB: len(ids)})
    packs = dtype == "float32" and build.expected()
    forms = {name: _form(info) for name, info in model.tensors.items() if packs}
    tables = [name for name, info in model.tensors.items() if len(info.shape) == 2 and name.endswith(_EMBEDDINGS)]
    last = next((name for name in model.tensors if name.endswith(_OUTPUTS)), tables[-1] if tables else "")
    translated, total = model.translation, 0
    more = (1, 1) if translated is None else (len(translated.own), translated.known)
    for name, info in model.tensors.items():
        form, rows = forms.get(name), info.shape[0] if info.shape else 1
        packed = all(forms.get(other) for other in _beside(name) if other in model.tensors)
        layer = _nbytes(info, form if packed else None, item, packs, quantize)
        predicted = model.config.get(DRAFT_VOCAB) if name == last else None
        if type(predicted) is int and predicted < rows:
            # A table has the rows of all ids, side by side with codes in 8 bits, and is the embedding, too.
            wide = None if form is None else form._replace(bits=8, head_bytes=4, span=0)
            total += layer * predicted // rows + _nbytes(info, wide, item, packs) * more[0] // more[1]
        elif name in tables and name == last:
            shared = dtype == "float16" or (packs and (form is not None or quantize == "none"))
            total += layer if shared else layer + _nbytes(info, form, item, packs)
        elif name in tables:
            total += _nbytes(info, form, item, packs) * more[0] // more[1]
        else:
            total += layer
    return total


def _beside(name: str) -> list[str]:
    module, _, layer = name.removesuffix(".weight").rpartition(".")
    return [f"{module}.{other}.weight" for stack in _STACKS if layer in stack for other in stack if other != layer]


def _nbytes(info: TensorInfo, form: Form | None, item: int, packs: bool, quantize: Rounding = "none") -> int:
    """Return the bytes of a tensor whose numbers take `item` each, unless they have a `form` or are rounded."""
    if len(info.shape) != 2:
        return item * math.prod(info.shape)
    inputs = info.shape[1]
    if quantize == "light" and packs and (form is None or form.bits > _LIGHT.bits) and inputs % _LIGHT.group == 0:
        form = _LIGHT._replace(span=inputs)
    elif form is None and quantize != "none":
        form = Form(8, inputs, 1, 4)
    if form is not None:
        return form.nbytes(*info.shape)
    return math.prod(info.shape) * (2 if packs and info.dtype in ("BF16", "F16") else item)


def _form(info: TensorInfo) -> Form | None:
    """Return the form in which our kernels keep a tensor's bits, or None if it becomes floats."""
    if len(info.shape) != 2:
        return None
    if isinstance(info, GgufTensor):
        return None if info.transposed and info.dtype not in _FOUND_AGAIN else GGUF_FORMS.get(info.dtype)
    return _quantized(info) if isinstance(info, QuantizedTensor) else None


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

    return draft_kind(model).repeated(model) * item_bytes + sum(map(size, model.tensors.values()))


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
