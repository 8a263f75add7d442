"""Weights of few bits on a GPU: packed once, then multiplied and looked up in packed form.

With TRITON_INTERPRET=1 the kernels run on a CPU, slowly, for tests."""

from __future__ import annotations

from collections.abc import Sequence
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
# Words of an output that a program reads at a time: the first where groups allow it, else the second.
_UNITS = 32, 16
_MOST_SPLITS = 8
# Programs that keep a multiprocessor busy, and fewest tiles of inputs of one.
_OCCUPANCY, _LEAST_TILES = 2, 2


def takes(weight: Grouped) -> bool:
    """Return True if `packed_product` takes the groups of this weight."""
    return all(part.group % min(_UNITS) == 0 for part in _parts(weight))


def packed_product(weight: Grouped, bias: Tensor | None = None) -> PackedProduct | PackedStack:
    """Pack a weight and b [out] for x W^T + b."""
    if isinstance(weight, Groups):
        return PackedProduct(weight, bias)
    sizes = [part.shape[0] for part in weight.parts]
    biases = [None] * len(sizes) if bias is None else bias.split(sizes)
    return PackedStack([PackedProduct(part, own) for part, own in zip(weight.parts, biases, strict=True)])


def _parts(weight: Grouped) -> tuple[Groups, ...]:
    return (weight,) if isinstance(weight, Groups) else weight.parts


class PackedProduct:
    """y = x W^T + b for x [n, in] -> y [n, out] of the type of x, with W in `weight`'s codes, steps and offsets.

    All sums are in float32, and no number of W is rounded. Each number of y is the sum of fixed splits of the inputs,
    and each split is a sum of fixed units. Up to `FEW_ROWS` rows the same instructions add them up, so a row has the
    same bits in any batch; beyond that, tiles are larger, and tensor cores may round otherwise."""

    def __init__(self, weight: Groups, bias: Tensor | None = None, processors: int | None = None) -> None:
        """Pack the weight. `processors`: multiprocessors to keep busy, by default all of the weight's device."""
        device, (self._outputs, self._inputs) = weight.codes.device, weight.shape
        self._bits = 4 if not weight.e4m3 and int(weight.codes.max()) < 16 else 8
        places = 32 // self._bits
        fitting = [unit for unit in _UNITS if weight.group % unit == 0]
        self._unit = min(fitting, key=lambda unit: -self._inputs % (unit * places))  # the least padding
        self._codes = _packed(weight.codes, self._unit, self._bits)
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
        self._sums = {"SUMMED": summed, "sums_a_group": units // summed}
        programs = _OCCUPANCY * (processors or processors_of(device))
        wanted = min(-(-programs // blocks), _MOST_SPLITS, max(1, tiles // _LEAST_TILES))
        self._share = -(-tiles // wanted)
        self._splits = -(-tiles // self._share)
        if device.type == "cuda":  # so that all variants are compiled before the first answer
            for rows in (1, FEW_ROWS, FEW_ROWS + 1):
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
        block_m = 16 if floats or rows <= 16 else 32 if few else 128
        bias = self._bias if self._bias is not None else self._steps
        product_kernel[-(-rows // block_m), self._codes.shape[0], splits](
            x,
            self._codes,
            self._steps,
            self._steps if self._offsets is None else self._offsets,
            bias,
            parts,
            rows,
            self._outputs,
            self._inputs,
            x.stride(0),
            self._codes.shape[1],
            share,
            self._steps.shape[1],
            **self._sums,
            ZERO=self._empty.zero,
            BITS=self._bits,
            E4M3=self._empty.e4m3,
            SHIFTED=self._offsets is not None,
            BIASED=self._bias is not None,
            WHOLE=whole,
            UNIT=self._unit,
            BLOCK_M=block_m,
            BLOCK_N=BLOCK_N,
            WIDE=x.device.type == "cpu" and x.dtype == torch.bfloat16,
            num_warps=4 if few else 8,
            num_stages=4 if few and not floats else 2,
            **launch_options(x.device),
        )
        if not whole:
            sum_kernel[rows, -(-self._outputs // 1024)](
                parts,
                bias,
                out,
                rows,
                self._outputs,
                BIASED=self._bias is not None,
                SPLITS=splits,
                BLOCK=1024,
                num_warps=4,
                **launch_options(x.device),
            )
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """Return the rows [n, in] of W for `ids` int64 [n], in the weight's type. The host never waits."""
        block, place = ids // BLOCK_N, ids % BLOCK_N
        words = self._codes[block, :, place]  # [n, tiles, unit]
        shifts = torch.arange(0, 32, self._bits, device=ids.device, dtype=torch.int32)
        codes = (words[:, :, None] >> shifts[:, None]).bitwise_and_((1 << self._bits) - 1)
        codes = codes.to(torch.uint8).flatten(1)[:, : self._inputs]
        groups = self._inputs // self._empty.group
        steps, offsets = (
            None if part is None else part[block, :groups, place].float() for part in (self._steps, self._offsets)
        )
        assert steps is not None
        return replace(self._empty, codes=codes, steps=steps, offsets=offsets).dequantized()

    def dots(self, x: Tensor, ids: Tensor) -> Tensor:
        """Multiply x [n, in] by the rows of `ids` int64 [k] -> [n, k]."""
        return x @ self.rows(ids).T


class PackedStack:
    """Multiplies by weights one below the other, with the results side by side."""

    def __init__(self, parts: Sequence[PackedProduct]) -> None:
        self.parts = parts

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=1)


def _packed(codes: Tensor, unit: int, bits: int) -> Tensor:
    """Pack codes uint8 [out, in] into words int32 [blocks of outputs, tiles, BLOCK_N, unit]."""
    outputs, inputs = codes.shape
    places = 32 // bits
    blocks, tiles = -(-outputs // BLOCK_N), -(-inputs // (places * unit))
    whole = torch.nn.functional.pad(codes, (0, tiles * places * unit - inputs, 0, blocks * BLOCK_N - outputs))
    laid = whole.view(blocks, BLOCK_N, tiles, places, unit).transpose(1, 2)
    words = torch.zeros(blocks, tiles, BLOCK_N, unit, dtype=torch.int32, device=codes.device)
    for place in range(places):
        words |= laid[:, :, :, place].int() << bits * place
    return words


def _by_blocks(heads: Tensor, groups: int) -> Tensor:
    """Reorder steps or offsets [out, groups] to [blocks of outputs, groups, BLOCK_N].

    The result has the shortest type that holds them exactly."""
    outputs, found = heads.shape
    whole = torch.nn.functional.pad(heads, (0, groups - found, 0, -outputs % BLOCK_N))
    short = next((kind for kind in (torch.float16, torch.bfloat16) if torch.equal(heads.to(kind).float(), heads)), None)
    return whole.view(-1, BLOCK_N, groups).transpose(1, 2).to(short or heads.dtype).contiguous()
