"""Quantised safetensors: every layout gives the numbers of a plain dequantiser, and the logits of these numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ssd.config.params import SamplingParams, Speculation
from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.kernels.groups import Groups
from ssd.layers import linear
from ssd.layers import quantized as quantized_layers
from ssd.layers.quantized import PackedProduct
from ssd.layers.ranks import Ranks
from ssd.models import stored
from ssd.models.checkpoint import inspect
from ssd.models.quantization import QUANTIZATION
from ssd.models.weights import from_checkpoint
from tests.draft.pair import Draft, Pair, config
from tests.models import tiny
from tests.ranks import part, side_by_side

GROUP = 16
HUGE = 1 << 40
SIZES = {"intermediate_size": 64, "std": 0.2}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Layout = Callable[[str, int, int, torch.Generator], tuple[dict[str, Tensor], Tensor]]
"""(module, outputs, inputs, generator) -> (its tensors, the weight float32 [out, in])"""


def packed(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[n, m] -> int32 [n, m * bits / 32]; the number at place i of a word is that of `order[i]`."""
    if bits == 3:
        return in_three_words(numbers)
    count = 32 // bits
    rows = []
    for row in numbers.tolist():
        words = [row[start : start + count] for start in range(0, len(row), count)]
        sums = [sum(word[place] << bits * i for i, place in enumerate(order or range(count))) for word in words]
        rows.append([total - (1 << 32) * (total >> 31) for total in sums])
    return torch.tensor(rows, dtype=torch.int32)


def in_three_words(numbers: Tensor) -> Tensor:
    """[n, m] numbers of 3 bits -> int32 [n, m / 32 * 3]: the eleventh and the 22nd of 32 lie in two words each."""
    rows = []
    for row in numbers.tolist():
        words = []
        for start in range(0, len(row), 32):
            part = row[start : start + 32]
            first = sum(number << 3 * i for i, number in enumerate(part[:10])) | (part[10] & 3) << 30
            second = part[10] >> 2 | sum(number << 3 * i + 1 for i, number in enumerate(part[11:21])) | part[21] << 31
            third = part[21] >> 1 | sum(number << 3 * i + 2 for i, number in enumerate(part[22:]))
            words += [first, second & 0xFFFFFFFF, third]
        rows.append([word - (1 << 32) * (word >> 31) for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def drawn(outputs: int, inputs: int, bits: int, group: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Codes [out, in], zeros and scales [out, groups]. Zeros leave out what GPTQ's first format cannot store."""
    most, groups = 1 << bits, inputs // group
    codes = torch.randint(most, (outputs, inputs), generator=generator)
    zeros = torch.randint(most // 4, 3 * most // 4, (outputs, groups), generator=generator)
    return codes, zeros, (torch.rand(outputs, groups, generator=generator) + 0.5) * 0.5 / most


def plain(codes: Tensor, zeros: Tensor, scales: Tensor, order: Tensor) -> Tensor:
    """(code - zero) * scale of the group of each input, in double."""
    columns = [(codes[:, i] - zeros[:, g]).double() * scales[:, g].double() for i, g in enumerate(order.tolist())]
    return torch.stack(columns, dim=1).float()


def awq(group: int = GROUP, kind: torch.dtype = torch.float16) -> Layout:
    def make(module: str, outputs: int, inputs: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        size = inputs if group < 0 else group
        codes, zeros, scales = drawn(outputs, inputs, 4, size, generator)
        scales = scales.to(kind)
        parts = {"qweight": packed(codes.T, 4, AWQ_ORDER), "qzeros": packed(zeros.T, 4, AWQ_ORDER), "scales": scales.T}
        return named(module, parts), plain(codes, zeros, scales, torch.arange(inputs) // size)

    return make


def gptq(bits: int, less: int = 1, symmetric: bool = False, ordered: bool = False) -> Layout:
    def make(module: str, outputs: int, inputs: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        codes, zeros, scales = drawn(outputs, inputs, bits, GROUP, generator)
        zeros, scales = torch.full_like(zeros, 1 << bits - 1) if symmetric else zeros, scales.half()
        order = torch.arange(inputs) // GROUP
        order = order[torch.randperm(inputs, generator=generator)] if ordered else order
        parts = {"qweight": packed(codes, bits).T, "qzeros": packed(zeros.T - less, bits), "scales": scales.T}
        return named(module, parts | {"g_idx": order.int()}), plain(codes, zeros, scales, order)

    return make


def packed_rows(bits: int, zeros: bool = False, group: int = GROUP, ordered: bool = False) -> Layout:
    def make(module: str, outputs: int, inputs: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        size = group or inputs
        codes, middles, scales = drawn(outputs, inputs, bits, size, generator)
        order, scales = torch.arange(inputs) // size, scales.bfloat16()
        parts = {"weight_packed": packed(codes, bits), "weight_scale": scales}
        parts |= {"weight_shape": torch.tensor([outputs, inputs])}
        if ordered:
            order = order[torch.randperm(inputs, generator=generator)]
            parts["weight_g_idx"] = order.int()
        if zeros:
            parts["weight_zero_point"] = packed(middles.T, bits).T
        else:
            middles = torch.full_like(middles, 1 << bits - 1)
        return named(module, parts), plain(codes, middles, scales, order)

    return make


def eight_bits(groups: bool = False, zeros: bool = False) -> Layout:
    """Scales are for outputs, for groups, or, with zeros, for the tensor. Activations have static scales."""

    def make(module: str, outputs: int, inputs: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        codes, middles, scales = drawn(outputs, inputs, 8, GROUP if groups else inputs, generator)
        middles = middles if zeros else torch.full_like(middles, 128)
        parts = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales, "input_scale": torch.ones(1)}
        if zeros:
            parts |= {"weight_scale": scales[:1, 0], "weight_zero_point": (middles[:1, 0] - 128).to(torch.int8)}
            middles, scales = middles[:1].expand(outputs, -1), scales[:1].expand(outputs, -1)
        return named(module, parts), plain(codes, middles, scales, torch.arange(inputs) // (inputs // scales.shape[1]))

    return make


def fp8(rows: int, columns: int, name: str = "weight_scale", kind: torch.dtype = torch.float32) -> Layout:
    """Scales for blocks of so many rows and columns, 0 for all of them; for (0, 0) there is one number."""

    def make(module: str, outputs: int, inputs: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        high, wide = rows or outputs, columns or inputs
        numbers = torch.randn(outputs, inputs, generator=generator).to(torch.float8_e4m3fn)
        scales = torch.rand(-(-outputs // high), -(-inputs // wide), generator=generator).add(0.5).mul(0.2).to(kind)
        weight = torch.empty(outputs, inputs)
        for i in range(outputs):
            for j in range(scales.shape[1]):
                columns_of_j = slice(j * wide, (j + 1) * wide)
                weight[i, columns_of_j] = numbers[i, columns_of_j].float() * scales[i // high, j].float()
        return named(module, {"weight": numbers, name: scales if rows else scales.reshape(())}), weight

    return make


def mixed(module: str, outputs: int, inputs: int, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    kinds = {"mlp": packed_rows(4), "v_proj": fp8(0, 0), "o_proj": fp8(1, 0)}
    make = next((make for part, make in kinds.items() if part in module), eight_bits())
    return make(module, outputs, inputs, generator)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """A config of `compressed-tensors` that also quantises the inputs."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 8, "dynamic": True}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"a": group}, "ignore": ["lm_head"]}


def named(module: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{module}.{name}": tensor.contiguous() for name, tensor in parts.items()}


AWQ: dict[str, Any] = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP, "zero_point": True}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
BLOCKS = {"strategy": "block", "block_structure": [24, 48]}
SEVERAL = {
    "a": {"format": "pack-quantized", "weights": INT4},
    "b": {"format": "int-quantized", "weights": INT8},
    "c": {"format": "float-quantized", "weights": FP8},
}
MIXED = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": SEVERAL}
PACKED, INTEGERS, FLOATS, NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
LAYOUTS: dict[str, tuple[dict[str, Any], Layout, bool]] = {
    "awq": (AWQ, awq(), True),
    "awq-channels": (AWQ | {"group_size": -1, "version": "GEMM"}, awq(-1), True),
    "awq-float32-scales": (AWQ, awq(kind=torch.float32), False),
    "gptq-sym": (GPTQ, gptq(4, symmetric=True), True),
    "gptq-asym": (GPTQ | {"sym": False}, gptq(4), True),
    "gptq-v2": (GPTQ | {"checkpoint_format": "gptq_v2", "sym": False}, gptq(4, less=0), True),
    "gptq-8-bits": (GPTQ | {"bits": 8, "sym": False}, gptq(8), True),
    "gptq-3-bits": (GPTQ | {"bits": 3, "sym": False}, gptq(3), True),
    "gptq-2-bits": (GPTQ | {"bits": 2, "sym": False}, gptq(2), True),
    "gptq-desc_act": (GPTQ | {"desc_act": True}, gptq(4, ordered=True), False),
    "packed": (compressed(PACKED, **INT4), packed_rows(4), True),
    "packed-asym": (compressed(PACKED, **INT4 | {"symmetric": False}), packed_rows(4, zeros=True), True),
    "packed-8-bits": (compressed(PACKED, **INT8), packed_rows(8, group=0), True),
    "packed-8-bits-asym": (
        compressed(PACKED, **INT4 | {"num_bits": 8, "symmetric": False}),
        packed_rows(8, True),
        True,
    ),
    "packed-actorder": (compressed(PACKED, **INT4 | {"actorder": "group"}), packed_rows(4, ordered=True), False),
    "w8a8": (compressed(INTEGERS, **INT8), eight_bits(), True),
    "w8a8-groups": (
        compressed(INTEGERS, **INT8 | {"strategy": "group", "group_size": GROUP}),
        eight_bits(groups=True),
        True,
    ),
    "w8a8-asym": (
        compressed(INTEGERS, **INT8 | {"strategy": "tensor", "symmetric": False}),
        eight_bits(zeros=True),
        True,
    ),
    "naive-integers": (compressed(NAIVE, **INT8), eight_bits(), True),
    "naive-floats": (compressed(NAIVE, **FP8), fp8(1, 0), False),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8(1, 0), False),
    "fp8-tensor": (compressed(FLOATS, **FP8 | {"strategy": "tensor"}), fp8(0, 0), False),
    "fp8-channels": (compressed(FLOATS, **FP8), fp8(1, 0, kind=torch.bfloat16), False),
    "fp8-blocks": (compressed(FLOATS, **FP8 | BLOCKS), fp8(24, 48), False),
    "deepseek": ({"quant_method": "fp8", "weight_block_size": [24, 48]}, fp8(24, 48, "weight_scale_inv"), False),
    "huge-blocks": ({"quant_method": "fp8", "weight_block_size": [HUGE] * 2}, fp8(HUGE, HUGE, "weight_scale"), False),
}
"""config, tensors, and whether they stay integers"""
ALL = LAYOUTS | {"mixed": (MIXED, mixed, False)}


def quantized(name: str, folder: Path, kind: str = "llama") -> tuple[Path, Path, dict[str, Tensor]]:
    """The checkpoint in a layout, the same in float32, and the weights that were quantised."""
    settings, make, _ = ALL[name]
    heads = {"num_key_value_heads": 4} if "3-bits" in name else {}  # outputs are multiples of 32
    source = tiny.model(kind, folder / "float", **SIZES, **heads)
    stored, generator = dict[str, Tensor](), torch.Generator()
    # Copies: the file is written anew below, and what `load_file` returns is mapped from it.
    floats = {key: tensor.clone() for key, tensor in load_file(source / "model.safetensors").items()}
    weights = {}
    for key, tensor in floats.items():
        module = key.removesuffix(".weight")
        if not key.endswith("_proj.weight") or module == "model.layers.1.mlp.up_proj":  # one is left as it is
            stored[key] = tensor
            continue
        parts, weights[key] = make(module, *tensor.shape, generator)
        stored |= parts
    tiny.noisy_copy(source, folder / "quantized", noise=0)
    save_file(stored, folder / "quantized" / "model.safetensors", metadata={"format": "pt"})
    save_file(floats | weights, source / "model.safetensors", metadata={"format": "pt"})
    return tiny.edit(folder / "quantized", **{QUANTIZATION: settings}), source, weights


@pytest.mark.parametrize("name", LAYOUTS)
def test_numbers_are_those_of_a_plain_dequantizer(name: str, tmp_path: Path) -> None:
    directory, _, weights = quantized(name, tmp_path)
    checkpoint = inspect(directory)
    assert checkpoint.nbytes < 0.5 * sum(4 * tensor.numel() for tensor in weights.values()) + (64 << 10)
    for dtype in (torch.float32, torch.bfloat16):
        read = from_checkpoint(checkpoint, dtype, tiny.CPU)
        for key, expected in weights.items():
            assert torch.equal(read(key, *expected.shape), expected.to(dtype)), key
            found = read.stacked([(key.removesuffix(".weight"), expected.shape[0])], expected.shape[1])
            assert isinstance(found, Groups) == (LAYOUTS[name][2] and dtype == torch.float32)
            number = found.dequantized() if isinstance(found, Groups) else found
            assert torch.equal(number, expected.to(dtype)), key


@pytest.mark.parametrize(
    ("name", "kind"), [("mixed", "llama"), ("awq", "qwen2")] + [(name, "llama") for name in LAYOUTS]
)
def test_logits_are_those_of_the_dequantized_weights(name: str, kind: str, tmp_path: Path) -> None:
    directory, floats, _ = quantized(name, tmp_path, kind)
    ids = tiny.token_ids(30, 1)
    ours = tiny.runner(directory).forward([Row(ids, 0, range(8), len(ids))])
    assert (ours - tiny.oracle_logits(tiny.oracle(floats), ids)).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["awq", "gptq-desc_act", "packed-asym", "fp8-blocks"])
def test_ranks_read_their_part(name: str, tmp_path: Path) -> None:
    directory, floats, _ = quantized(name, tmp_path)
    ids = tiny.token_ids(30, 1)

    def of(model: Path) -> Tensor:
        def rank(ranks: Ranks) -> Tensor:
            return part(model, ranks).forward([Row(ids, 0, range(8), len(ids))])

        return side_by_side(2, rank)[0]

    assert torch.equal(of(directory), of(floats))


@pytest.fixture
def packed_layers(monkeypatch: pytest.MonkeyPatch) -> list[PackedProduct]:
    """Weights stay packed as on a GPU, and are multiplied by Triton's interpreter. The products that were made."""
    made: list[PackedProduct] = []

    class Noted(PackedProduct):
        def __init__(self, *args: Any, **fields: Any) -> None:
            super().__init__(*args, **fields)
            made.append(self)

        def __call__(self, x: Tensor) -> Tensor:
            with alone:  # the interpreter is for one thread
                return super().__call__(x)

    alone = Lock()
    monkeypatch.setattr(quantized_layers, "PackedProduct", Noted)
    for module in (linear, stored):
        monkeypatch.setattr(module, "fuses", lambda device: True)
    return made


# How many products two layers have with packed weights: four a layer, but one has a part that is not of few bits.
ON_GPU = {"awq": 7, "packed-asym": 7, "w8a8-groups": 7, "fp8-channels": 7, "deepseek": 7, "mixed": 9}


@pytest.mark.parametrize(("name", "stay"), ON_GPU.items())
def test_on_a_gpu_logits_are_those_of_the_dequantized_weights(
    name: str, stay: int, packed_layers: list[PackedProduct], tmp_path: Path
) -> None:
    """Through whole layers, of a prompt and of a verification."""
    directory, floats, _ = quantized(name, tmp_path)
    runner, ids = tiny.runner(directory), tiny.token_ids(9, 1)
    assert len(packed_layers) == stay
    first, rest = (
        runner.forward([Row(part, start, range(8), len(part))]) for part, start in ((ids[:6], 0), (ids[6:], 6))
    )
    expected = tiny.oracle_logits(tiny.oracle(floats), ids)
    assert (torch.cat((first, rest)) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["awq", "packed-asym", "fp8-channels", "deepseek"])
def test_on_gpus_ranks_pack_their_part(name: str, packed_layers: list[PackedProduct], tmp_path: Path) -> None:
    directory, floats, _ = quantized(name, tmp_path)
    ids = tiny.token_ids(7, 1)

    def rank(ranks: Ranks) -> Tensor:
        return part(directory, ranks).forward([Row(ids, 0, range(8), len(ids))])

    found = side_by_side(2, rank)[0]
    assert len(packed_layers) == 2 * ON_GPU[name]
    assert (found - tiny.oracle_logits(tiny.oracle(floats), ids)).abs().max() < 1e-4
    parts = sum(product._outputs * product._inputs for product in packed_layers)
    packed_layers.clear()
    tiny.runner(directory)
    assert parts == sum(product._outputs * product._inputs for product in packed_layers), "each has its part alone"


def test_a_quantized_draft_gives_the_ids_of_ar(tmp_path: Path) -> None:
    draft, target, _ = quantized("awq", tmp_path)
    params, settings = (
        [SamplingParams(max_tokens=20)],
        config(Speculation("ssd", 4, (3,), "jit"), num_pages=512, draft_num_pages=512),
    )
    alone = Pair(config(Speculation("ar"), num_pages=512, draft_num_pages=512), tiny.runner(target), None)
    expected = alone.run([[1, 2, 3]], params).ids
    texts = Pair(settings, tiny.runner(target), Draft(settings, tiny.runner(draft))).run([[1, 2, 3]], params)
    assert texts.ids == expected
    assert texts.metrics[0].accepted_tokens > 5


MODULE = "model.layers.0.mlp.down_proj"
BROKEN: list[tuple[str, dict[str, Tensor | None], str]] = [
    ("awq", {"scales": None}, f"tensor {MODULE}.scales is missing"),
    ("awq", {"qzeros": None}, f"tensor {MODULE}.qzeros is missing"),
    ("awq", {"scales": torch.ones(4, 31)}, r"down_proj.scales of shape \(4, 31\) does not fit .*expected \(any, 32\)"),
    ("awq", {"scales": torch.ones(0, 32)}, r"down_proj.scales of shape \(0, 32\) does not fit"),
    ("awq", {"scales": torch.ones(4, 32, dtype=torch.int8)}, "down_proj.scales has type I8"),
    ("awq", {"scales": torch.full((4, 32), torch.nan)}, "down_proj.scales holds numbers that are not finite"),
    ("awq", {"qzeros": torch.ones(4, 3, dtype=torch.int32)}, r"down_proj.qzeros of shape \(4, 3\)"),
    ("awq", {"qweight": torch.ones(8, 4, dtype=torch.int32)}, "8 inputs are not 4 groups of 16"),
    ("awq", {"qweight": torch.ones(64, 4, dtype=torch.int64)}, "down_proj.qweight must be a matrix of I32, is I64"),
    ("awq", {"weight": torch.ones(32, 64)}, f"there are both {MODULE}.weight and {MODULE}.qweight"),
    (
        "awq",
        {"scales": torch.ones(3, 32), "qzeros": torch.ones(3, 4, dtype=torch.int32)},
        "64 inputs .* 3 groups",
    ),
    ("gptq-asym", {"g_idx": torch.full((64,), 4, dtype=torch.int32)}, "down_proj.g_idx names groups beyond the 4"),
    ("gptq-asym", {"g_idx": torch.full((64,), -1, dtype=torch.int32)}, "down_proj.g_idx names groups beyond the 4"),
    ("gptq-asym", {"g_idx": torch.zeros(63, dtype=torch.int32)}, r"down_proj.g_idx of shape \(63,\)"),
    ("packed-asym", {"weight_zero_point": None}, f"tensor {MODULE}.weight_zero_point is missing"),
    ("packed-asym", {"weight_zero_point": torch.ones(3, 4, dtype=torch.int32)}, r"point of shape \(3, 4\) does not"),
    ("packed-asym", {"weight_scale": None}, f"tensor {MODULE}.weight_scale is missing"),
    ("fp8-blocks", {"weight_scale": torch.ones(2, 3)}, r"_scale of shape \(2, 3\) does not .*expected \(2, 2\)"),
    ("fp8-blocks", {"weight_scale": None}, f"tensor {MODULE}.weight_scale is missing"),
    ("fp8-blocks", {"weight": torch.full((32, 64), torch.nan).to(torch.float8_e4m3fn)}, "not finite in float32"),
    ("deepseek", {"weight_scale_inv": None}, f"tensor {MODULE}.weight_scale_inv is missing"),
    (
        "gptq-asym",
        {"qzeros": torch.full((4, 4), -1, dtype=torch.int32)},
        "qzeros stores a zero as 15.*gptq_v2 can",
    ),
    ("gptq-3-bits", {"qweight": torch.ones(5, 32, dtype=torch.int32)}, "qweight is 32 x 53, no multiples of 32"),
]


@pytest.mark.parametrize("name", sorted({name for name, _, _ in BROKEN}))
def test_parts_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    directory, _, _ = quantized(name, tmp_path)
    whole = load_file(directory / "model.safetensors")
    for _, changes, message in [case for case in BROKEN if case[0] == name]:
        changed = whole | {f"{MODULE}.{part}": tensor for part, tensor in changes.items()}
        kept = {key: tensor for key, tensor in changed.items() if tensor is not None}
        save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UsageError, match=message):
            tiny.runner(directory)


@pytest.mark.parametrize("name", ["awq", "gptq-asym", "packed", "w8a8-groups"])
def test_groups_of_another_size_than_the_config_says_are_refused(name: str, tmp_path: Path) -> None:
    """64 inputs in groups of 48 are a whole group and a part of one: 2 scales, not for 32 inputs each."""
    directory, _, _ = quantized(name, tmp_path)
    text = (directory / "config.json").read_text()
    (directory / "config.json").write_text(text.replace(f'"group_size": {GROUP}', '"group_size": 48'))
    if name == "gptq-asym":  # with it, an input's group is known
        stored = load_file(directory / "model.safetensors")
        kept = {key: tensor for key, tensor in stored.items() if not key.endswith("g_idx")}
        save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"_proj.*scale.* inputs are not . groups of 48, the group_size of the config"):
        inspect(directory)


def test_g_idx_says_where_groups_end(tmp_path: Path) -> None:
    """A last group that is shorter than the others, as AutoGPTQ writes it."""
    directory, _, _ = quantized("gptq-asym", tmp_path)
    stored = load_file(directory / "model.safetensors")
    module, order, generator = MODULE, torch.arange(64) // 24, torch.Generator().manual_seed(1)
    codes, zeros, scales = drawn(32, 72, 4, 24, generator)
    codes, scales = codes[:, :64], scales.half()
    parts = {"qweight": packed(codes, 4).T, "qzeros": packed(zeros.T - 1, 4), "scales": scales.T, "g_idx": order.int()}
    save_file(stored | named(module, parts), directory / "model.safetensors", metadata={"format": "pt"})
    read = from_checkpoint(inspect(directory), torch.float32, tiny.CPU)
    assert torch.equal(read(f"{module}.weight", 32, 64), plain(codes, zeros, scales, order))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes' is not read"),
        ({}, "quant_method None is not read"),
        (AWQ | {"bits": 3}, "bits is 3, not 4"),
        (AWQ | {"bits": True}, "bits is True, not 4"),
        (AWQ | {"version": "gemv"}, "version is 'gemv', not 'gemm'"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size is "),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'"),
        (compressed("mxfp4-pack-quantized", **INT4), "format is 'mxfp4-pack-quantized'"),
        (compressed(FLOATS, **FP8 | {"symmetric": False}), "symmetric is False"),
        (compressed(PACKED, **INT4 | {"num_bits": 2}), "num_bits is 2"),
        (GPTQ | {"bits": 5}, "bits is 5, not 2 or 3 or 4 or 8"),
        (GPTQ | {"group_size": 0}, "group_size is 0, not -1 or a positive number"),
        (compressed(NAIVE, **INT4), "num_bits is 4, not 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
    ],
)
def test_other_methods_are_refused_by_name(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiny.edit(tiny.llama(tmp_path), **{QUANTIZATION: settings})
    with pytest.raises(UsageError, match=f"config.json has quantization_config: .*{message}"):
        inspect(tmp_path)
