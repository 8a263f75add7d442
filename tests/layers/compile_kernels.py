"""Compiles the Triton kernels for GPUs that are not here (sm_90, sm_80): `python -m tests.layers.compile_kernels`.

Arguments: the capabilities to compile for, 90 and 80 by default.

Without TRITON_INTERPRET, in a process of its own. Prints a line for each variant: how it multiplies and loads, and for
sm_90 the instructions a weight that a loop over packed weights takes. Fails where one needs more shared memory than
there is, spills registers, or takes more instructions than it should.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ssd.kernels.triton_adjustment import adjust_kernel, recent_kernel
from ssd.kernels.triton_rounds import build_kernel, decide_kernel
from ssd.kernels.triton_sampling import best_kernel, last_kernel, lowest_kernel, noise_kernel, warm_kernel
from ssd.law import DRAWN
from ssd.layers.paged import PagedRows
from ssd.layers.triton_attention import TritonAttention
from ssd.layers.triton_fused import gate_kernel, norm_kernel, turn_kernel
from ssd.layers.triton_kernels import attend_kernel, merge_kernel
from ssd.layers.triton_quantized import product_kernel, sum_kernel
from ssd.layers.triton_states import convolve_kernel, delta_kernel

CAPABILITIES = tuple(map(int, sys.argv[1:])) or (90, 80)
_SPILLED = 16  # bytes a thread: a few registers of an attention on sm_80
_SPILLED_WIDE = 256  # in tiles of 64 queries in 16 bits with heads of 256; half as many queries would miss wgmma
_SPILLED_ROWS = 48  # in packed products of many rows
_SPILLED_SUMS = 800  # in those with offsets on sm_80, where 128 rows' sums do not fit beside the products
_SHARED = {90: 232448, 80: 166912}  # bytes that a program may have (CUDA C++ Programming Guide, compute capabilities)
_NUMBERS = {"scale": "fp32", "softcap": "fp32", "positions": "*i64", "seen": "*i64", "slots": "*i64"}
_NUMBERS |= {"least": "fp32", "behind_least": "fp32"}
_POINTERS = ("table", "sequences", "starts")
_ALIGNED = ("q", "keys", "values", "out", "kv_stride", "q_stride", "q_head_stride", "x", "weight", "x_stride")
_ALIGNED += ("weight_stride", "parts", "outputs", "codes", "steps", "offsets", "bias")


def compiled(
    title: str,
    kernel: Any,
    constants: dict[str, Any],
    element: str,
    result: str,
    warps: int = 4,
    most_spilled: int = _SPILLED,
    stages: int = 2,
    most_instructions: float = 0.0,
    **types: str,
) -> None:
    """Compile a kernel for these constants and print what came of it. `element` and `result` are the types that it
    reads and writes, `types` others. `most_instructions`: of a packed product's loop on sm_90, a weight."""
    elements = {"q", "keys", "values", "x", "added", "total", "gate_up", "cos", "sin", "logits"}
    floats = {"totals", "parts", "part_totals", "weight", "behind", "q_weight", "k_weight", "inverse", "lowest"}
    constants = constants | ({"PDL": False} if "PDL" in kernel.arg_names else {})
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in types:
            signature[name] = types[name]
        elif name in elements:
            signature[name] = f"*{element}"
        elif name == "out":
            signature[name] = f"*{result}"
        elif name in floats:
            signature[name] = "*fp32"
        else:
            signature[name] = _NUMBERS.get(name, "*i32" if name in _POINTERS else "i32")
    places = {name: (index,) for index, name in enumerate(kernel.arg_names)}
    aligned = {places[name]: [["tt.divisibility", 16]] for name in _ALIGNED if name in places}

    def made_for(capability: int, **more: bool) -> Any:
        values = {places[name]: value for name, value in (constants | more).items()}
        options = {"num_warps": warps, "num_stages": stages}
        source = ASTSource(kernel, signature, values, aligned)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)

    if "PDL" in constants:
        early = made_for(90, PDL=True).asm["ptx"].partition("griddepcontrol.wait")[0]
        touched = re.findall(r"\b(?:ld\.global|st\.|atom|ret;|bra|cp\.async)", early)
        assert kernel is norm_kernel or not touched, (title, touched)
        assert set(touched) <= {"ld.global"}, (title, touched)  # weights of a norm
    for capability in CAPABILITIES:
        made = made_for(capability)
        assert made.metadata.shared <= _SHARED[capability], (title, made.metadata.shared)
        code = made.asm["ptx"]
        found = [unit for unit in ("wgmma", "mma.sync") if unit in code][:1]
        found += ["copies ahead"] if "cp.async" in code else []
        spilled = _spilled(code, capability)
        assert spilled <= most_spilled, (title, spilled)
        if most_instructions and capability == 90:
            tile = constants["BLOCK_N"] * constants["UNIT"] * 16 // constants["BITS"]
            each = _loop(made.asm["cubin"]) * 32 * warps / tile
            assert each <= most_instructions, (title, each)
            found.append(f"{each:.2f} instructions a weight")
        print(f"sm_{capability} {title}: {', '.join(found)}".removesuffix(": "))


def attention(dtype: torch.dtype, dim: int, deterministic: bool = False, **others: Any) -> None:
    """Compile attention with the tiles that a GPU of 132 multiprocessors takes for rows of 8 queries and 4,096 keys.

    `others`: constants that differ from those of a plain cache and rule, and `types` of pointers."""
    elements = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    none = torch.zeros(1, dtype=torch.int32)
    rows = PagedRows(torch.zeros(1, 256, dtype=torch.int32), none, none, none, none, 16, longest=8)
    tiling = TritonAttention(torch.device("cuda"), deterministic, processors=132).tiling(rows, 32, 8, dim, dtype)
    constants = {"PAGE": 16, "HEADS": 32, "GROUP": 4, "DIM": dim, "WIDE": False, "FP8": False}
    constants |= {"WINDOWED": False, "CAPPED": False, "WHOLE": tiling.splits == 1}
    constants |= {"BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n, "BLOCK_D": tiling.block_d}
    types = others.pop("types", {})
    words = [f"{8 * dtype.itemsize} bits", f"heads of {dim}"]
    words += ["deterministic"] if deterministic else []
    words += list(others)
    spilled = _SPILLED_WIDE if dim > 128 and tiling.block_m == 64 else _SPILLED
    title, constants = f"attend, {', '.join(words)}", constants | others
    compiled(title, attend_kernel, constants, elements[dtype], "fp32", most_spilled=spilled, **types)


def _spilled(code: str, capability: int) -> int:
    """The bytes of registers that a kernel writes to memory, by Triton's own assembler."""
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        (source := Path(folder) / "kernel.ptx").write_text(code)
        target = "sm_90a" if capability == 90 else f"sm_{capability}"
        command = [str(assembler), "-v", f"--gpu-name={target}", str(source), "-o", str(Path(folder) / "kernel.cubin")]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return sum(map(int, re.findall(r"(\d+) bytes spill stores", said)))


def _loop(cubin: bytes) -> int:
    """The instructions of the longest loop."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([str(tool), "-sass", file.name], check=True, capture_output=True, text=True).stdout
    lines = [(int(at, 16), code) for at, code in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", said, re.M)]
    jumps = [(int(to[1], 16), at) for at, code in lines if (to := re.search(r"BRA.* 0x([0-9a-f]+)", code))]
    return max(sum(begin <= at <= end for at, _ in lines) for begin, end in jumps)


def main() -> None:
    eight = dict.fromkeys(("keys", "values"), "*u8")
    for dtype in (torch.bfloat16, torch.float32):
        for dim in (128, 256):
            for deterministic in (False, True):
                attention(dtype, dim, deterministic)
    attention(torch.float16, 64, True, WINDOWED=True, CAPPED=True)
    attention(torch.bfloat16, 128, FP8=True, types=eight)
    for dim in (128, 256):
        merged = {"DIM": dim, "MOST": 128, "BLOCK_S": 32, "BLOCK_D": dim}
        compiled(f"merge, heads of {dim}", merge_kernel, merged, "fp32", "bf16")
    heads = {"HEADS": 32, "KV_HEADS": 8, "DIM": 128, "TURNED": 128, "BLOCK": 128, "NORMED": True, "FP8": False}
    sampling = {"keys": "*i32", "places": "*i32", "values": "*fp32", "ids": "*i64"}
    for kernel, constants, types in (
        (norm_kernel, {"SIZE": 4096, "BLOCK": 4096, "ADDED": True, "BEHIND": True}, {}),
        (gate_kernel, {"SIZE": 14336, "BLOCK": 1024, "GELU": True}, {}),
        (turn_kernel, heads, {}),
        (noise_kernel, {"LISTED": True, "BLOCK": 2048}, {**sampling, "out": "*fp32"}),
        (best_kernel, {"WARM": True, "FILTERED": True, "BLOCK": 2048}, sampling),
        (last_kernel, {"BLOCK": 64}, {**sampling, "out": "*i64"}),
        (warm_kernel, {"LISTED": True, "FILTERED": True, "BLOCK": 2048}, {**sampling, "out": "*fp32"}),
    ):
        compiled(kernel.__name__, kernel, constants, "bf16", "bf16", **types)
    compiled("turn_kernel, FP8 cache", turn_kernel, heads | {"FP8": True}, "bf16", "bf16", **eight)
    offsets = {name.upper(): place for place, name in enumerate(DRAWN)}
    laws = {"laws": "*fp32", "out": "*fp32"}
    compiled("lowest_kernel", lowest_kernel, offsets | {"DIGIT": 4, "BLOCK": 512}, "bf16", "fp32", 8, **laws)
    texts = dict.fromkeys(("starts", "sequences", "ids"), "*i64") | dict.fromkeys(("words", "text"), "*i32")
    sizes = {"NUMBERS": 5, "RECENT": 16, "BLOCK_R": 16, "BLOCK": 1024}
    compiled("adjust_kernel", adjust_kernel, sizes, "bf16", "fp32", **texts, bias="*fp32")
    words = {"NUMBERS": 4, "MOST": 15}
    entry = {"ENTRIES": 64, "WORDS": 27, "IDS": 12, "KEY": 1, "DEPTH": 9, "CHECKSUM": 10, "ENTRY_IDS": 11}
    entry |= {"LOOKAHEAD": 16, "SALT": 0x5353445F424F4132, "BLOCK_E": 64, "BLOCK_W": 32, "BLOCK_M": 16}
    integers = dict.fromkeys(("rows", "tokens", "board", "weights", "decided", "report"), "*i64")
    compiled("decide_kernel", decide_kernel, words | entry, "bf16", "bf16", **integers)
    told = {"WORDS": 21, "AT": 5, "IDS": 15, "BLOCK_M": 16}
    compiled("recent_kernel", recent_kernel, words | told, "bf16", "bf16", **integers, words="*i32")
    columns = ("rows", "decided", "ids", "positions", "slots", "low", "high", "laws", "starts", "sequences")
    places = {"PAGE": 16, "LAW": 11, "IDS": 15, "LOW": 27, "HIGH": 59, "BLOCK_R": 16, "BLOCK_T": 128}
    compiled("build_kernel", build_kernel, words | places, "bf16", "bf16", **dict.fromkeys(columns, "*i64"))
    tiles = {"BIASED": True, "WHOLE": False, "UNIT": 64, "SUMMED": 1, "SUMS": 1, "BLOCK_N": 64, "WIDE": False}
    packed = {"codes": "*i32", "steps": "*fp16", "offsets": "*fp16", "bias": "*bf16", "x": "*bf16", "parts": "*fp32"}
    for name, rows, constants in (
        ("4 bits with offsets", {8: 3.0, 16: 4.0}, {"ZERO": 0, "BITS": 4, "E4M3": False, "SHIFTED": True}),
        ("4 bits", {8: 2.5, 16: 3.1, 32: 4.3}, {"ZERO": 8, "BITS": 4, "E4M3": False, "SHIFTED": False}),
        ("8 bits", {8: 3.6, 32: 5.5}, {"ZERO": 128, "BITS": 8, "E4M3": False, "SHIFTED": False}),
        ("fp8", {8: 3.2, 16: 3.7, 32: 4.9}, {"ZERO": 0, "BITS": 8, "E4M3": True, "SHIFTED": False}),
    ):
        for count, most in rows.items():
            sizes = constants | tiles | {"BLOCK_M": count}
            title, spilled = f"packed, {name}, {count} rows", _SPILLED if count < 32 else _SPILLED_ROWS
            compiled(title, product_kernel, sizes, "bf16", "fp32", 2, spilled, 4, most, **packed)
        sizes = constants | tiles | {"BLOCK_M": 128}
        spilled = _SPILLED_SUMS if constants["SHIFTED"] else _SPILLED_ROWS
        compiled(f"packed, {name}, 128 rows", product_kernel, sizes, "bf16", "fp32", 8, spilled, **packed)
        half = packed | {"x": "*fp16", "bias": "*fp16"}
        sizes = constants | tiles | {"BLOCK_M": 8}
        compiled(f"packed, {name}, float16", product_kernel, sizes, "fp16", "fp32", 2, stages=4, **half)
    compiled("sum_kernel", sum_kernel, {"BIASED": True, "SPLITS": 8, "BLOCK": 1024}, "bf16", "bf16", **packed)
    states = dict.fromkeys(("states", "kept", "weight", "bias", "decay", "dt_bias"), "*fp32")
    states |= dict.fromkeys(("changes", "queries"), "*bf16") | dict.fromkeys(("rows", "places", "groups"), "*i64")
    window = {"FIELDS": 9, "WINDOW": 4, "BIAS": True, "SILU": True, "BLOCK": 256}
    compiled("convolve_kernel", convolve_kernel, window, "bf16", "bf16", **states)
    delta = {"FIELDS": 9, "HEADS": 32, "KEY_HEADS": 16, "KEY_DIM": 128, "VALUE_DIM": 128, "TILED": False}
    compiled("delta_kernel", delta_kernel, delta | {"BLOCK_K": 128, "BLOCK_V": 32}, "bf16", "bf16", **states)


if __name__ == "__main__":
    main()
