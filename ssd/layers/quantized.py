"""Weights of few bits on a GPU, packed once (on a CPU with TRITON_INTERPRET=1, slowly, for tests)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ssd.kernels.gpu import launch_options, processors_of
from ssd.kernels.groups import Grouped, Groups
from ssd.layers.triton_quantized import product_kernel, sum_kernel

FEW_ROWS = 64
"""Most rows of a batch in which a row has the same bits as in any other such batch."""
BLOCK_N = 64
"""Outputs of a program."""
# Inputs that a program multiplies at a time: the first that groups allow and that pads least.
_UNITS = 64, 32, 16
_MOST_SPLITS = 8
# Programs that keep a multiprocessor busy, and fewest tiles of inputs of one.
_OCCUPANCY, _LEAST_TILES = 3, 2
# Tiles that a multiprocessor reads while it writes and reads a split's part of 16 rows, and in a launch to add them up.
_PART, _LAUNCH = 1, 4


def takes(weight: Grouped) -> bool:
    return all(part.group % min(_UNITS) == 0 for part in ((weight,) if isinstance(weight, Groups) else weight.parts))


def packed_product(weight: Grouped, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    if isinstance(weight, Groups):
        return PackedProduct(weight, bias)
    sizes = [part.shape[0] for part in weight.parts]
    biases = [None] * len(sizes) if bias is None else bias.split(sizes)
    products = [PackedProduct(part, own) for part, own in zip(weight.parts, biases, strict=True)]
    return lambda x: torch.cat([product(x) for product in products], dim=1)


class PackedProduct:
    """y = x W^T + b for x [n, in] -> y [n, out] of the type of x, with W in `weight`'s codes, steps and offsets.

    All sums are in float32, and no number of W is rounded. Each number of y is the sum of fixed splits of the inputs,
    and each split is a sum of fixed units. Up to `FEW_ROWS` rows the same instructions add them up, so a row has the
    same bits in any batch; beyond that, tensor cores may round otherwise."""

    def __init__(self, weight: Groups, bias: Tensor | None = None, processors: int | None = None) -> None:
        device, (self._outputs, self._inputs) = weight.codes.device, weight.shape
        self._bits = 4 if not weight.e4m3 and int(weight.codes.max()) < 16 else 8
        places = 16 // self._bits
        fitting = [unit for unit in _UNITS if weight.group % unit == 0]
        self._unit = min(fitting, key=lambda unit: -self._inputs % (unit * places))  # the least padding
        self._codes = _packed(weight.codes, self._unit, self._bits, weight.e4m3)
        blocks, tiles = self._codes.shape[:2]
        groups = -(-tiles * places * self._unit // weight.group)
        self._steps = _by_blocks(weight.steps, groups)
        self._offsets = None if weight.offsets is None else _by_blocks(weight.offsets, groups)
        self._bias = None if bias is None else bias.contiguous()
        # The weight without rows; `rows` fills in the rows that it looks up.
        codes, steps = weight.codes.new_empty(0, self._inputs), weight.steps.new_empty(0, weight.steps.shape[1])
        self._empty = replace(weight, codes=codes, steps=steps, offsets=None)
        units = weight.group // self._unit
        summed = min(units & -units, places)
        self._form = {"ZERO": weight.zero, "BITS": self._bits, "E4M3": weight.e4m3, "UNIT": self._unit}
        self._form |= {"SHIFTED": self._offsets is not None, "SUMMED": summed, "SUMS": units // summed}
        self._share = -(-tiles // _splits(blocks, tiles, processors or processors_of(device)))
        self._splits = -(-tiles // self._share)
        if device.type == "cuda":  # so that all variants are compiled before the first answer
            for rows in (8, 16, FEW_ROWS, FEW_ROWS + 1):
                self(torch.zeros(rows, self._inputs, dtype=weight.dtype, device=device))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self._codes, self._steps, self._offsets) if part is not None)

    def __call__(self, x: Tensor) -> Tensor:
        x = x if x.stride(-1) == 1 else x.contiguous()
        rows, floats = x.shape[0], x.dtype == torch.float32
        out = x.new_empty(rows, self._outputs)
        if not rows:
            return out
        few = rows <= FEW_ROWS or floats
        splits, share = (self._splits, self._share) if few else (1, self._codes.shape[1])
        whole = splits == 1
        parts = out if whole else x.new_empty(splits, rows, self._outputs, dtype=torch.float32)
        # 32 rows and their sums, for offsets, do not fit into registers.
        most = 128 if not few else 16 if floats or self._offsets is not None else 32
        block_m = next(size for size in (8, 16, most) if rows <= size or size == most)
        bias = self._bias if self._bias is not None else self._steps
        options = launch_options(x.device)
        weight = self._codes, self._steps, self._steps if self._offsets is None else self._offsets, bias
        sizes = rows, self._outputs, self._inputs, x.stride(0), self._codes.shape[1], share, self._steps.shape[1]
        product_kernel[-(-rows // block_m), self._codes.shape[0], splits](
            x,
            *weight,
            parts,
            *sizes,
            **self._form,
            BIASED=self._bias is not None,
            WHOLE=whole,
            BLOCK_M=block_m,
            BLOCK_N=BLOCK_N,
            WIDE=x.device.type == "cpu" or (self._bits == 8 and self._empty.zero not in (0, 128)),
            # With four warps sm_90 has another instruction for 16 rows than for 8, which may round otherwise.
            num_warps=2 if few else 8,
            num_stages=4 if few and not floats else 2,
            **options,
        )
        if not whole:
            form = {"BIASED": self._bias is not None, "SPLITS": splits, "BLOCK": 1024, "num_warps": 4}
            sum_kernel[rows, -(-self._outputs // 1024)](parts, bias, out, rows, self._outputs, **form, **options)
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows [n, in] of W for `ids` int64 [n], in the weight's type. The host never waits."""
        block, place = ids // BLOCK_N, ids % BLOCK_N
        codes = _codes(self._codes[block, :, place], self._bits, self._empty.e4m3)[:, : self._inputs]
        groups = self._inputs // self._empty.group
        heads = [part[block, :groups, place].float() for part in (self._steps, self._offsets) if part is not None]
        offsets = heads[1] if len(heads) == 2 else None
        return replace(self._empty, codes=codes, steps=heads[0], offsets=offsets).dequantized()

    def dots(self, x: Tensor, ids: Tensor) -> Tensor:
        return x @ self.rows(ids).T


def _splits(blocks: int, tiles: int, processors: int) -> int:
    most = min(_MOST_SPLITS, max(1, tiles // _LEAST_TILES))
    least = min(most, -(-_OCCUPANCY * processors // blocks))

    def work(splits: int) -> int:
        adding = splits > 1
        return -(-blocks * splits // processors) * (-(-tiles // splits) + _PART * adding) + _LAUNCH * adding

    return min(range(least, most + 1), key=work)


def _packed(codes: Tensor, unit: int, bits: int, e4m3: bool) -> Tensor:
    """Pack codes uint8 [out, in] into words int32 [blocks of outputs, tiles, BLOCK_N, unit / 2].

    A half of a word has an input's codes of all places, integers one above the other. Of FP8 (s abcd efg: sign,
    exponent, fraction) place 0 has the bits 15 and 10 to 4, where a bfloat16 has its sign and the last bits of exponent
    and fraction; place 1 has the bits between: abc s at 14, d efg at 3."""
    outputs, inputs = codes.shape
    places = 16 // bits
    blocks, tiles = -(-outputs // BLOCK_N), -(-inputs // (places * unit))
    whole = torch.nn.functional.pad(codes, (0, tiles * places * unit - inputs, 0, blocks * BLOCK_N - outputs))
    laid = whole.view(blocks, BLOCK_N, tiles, places, unit).permute(3, 0, 2, 1, 4).short()
    halves = laid[0]
    if e4m3:
        halves = (halves & 0x80) << 8 | (halves & 0x7F) << 4
        halves |= (laid[1] & 0x70) << 8 | (laid[1] & 0x80) << 4 | laid[1] & 0x0F
    else:
        for place in range(1, places):
            halves |= laid[place] << bits * place
    return halves.contiguous().view(torch.int32)


def _codes(words: Tensor, bits: int, e4m3: bool) -> Tensor:
    halves = words.view(torch.int16)
    if e4m3:
        first = halves >> 8 & 0x80 | halves >> 4 & 0x7F
        codes = [first, halves >> 8 & 0x70 | halves >> 4 & 0x80 | halves & 0x0F]
    else:
        codes = [halves >> shift & (1 << bits) - 1 for shift in range(0, 16, bits)]
    return torch.stack(codes, dim=2).byte().flatten(1)


def _by_blocks(heads: Tensor, groups: int) -> Tensor:
    """Reorder steps or offsets [out, groups] to [blocks of outputs, groups, BLOCK_N], in the shortest exact type."""
    outputs, found = heads.shape
    whole = torch.nn.functional.pad(heads, (0, groups - found, 0, -outputs % BLOCK_N))
    short = next((kind for kind in (torch.float16, torch.bfloat16) if torch.equal(heads.to(kind).float(), heads)), None)
    return whole.view(-1, BLOCK_N, groups).transpose(1, 2).to(short or heads.dtype).contiguous()
