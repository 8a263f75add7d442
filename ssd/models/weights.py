"""Gives a family the tensors that it asks for by name and shape; the family never sees files."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ssd.kernels.groups import Grouped, Groups, stacked
from ssd.layers.linear import Linear, Table
from ssd.layers.ranks import ParallelEmbedding, RowParallel
from ssd.models.checkpoint import Checkpoint, Translation
from ssd.models.split import WHOLE, Piece, Share
from ssd.models.stored import Progress, StoredTensors

Reader = Callable[..., Tensor]
"""(name, shape of the whole tensor[, the piece of it that is wanted]) -> the tensor, or its piece"""
GroupReader = Callable[[str, tuple[int, ...], Piece], Groups | None]
"""A `Reader` of weights of few bits; None for another weight, and if the piece cuts a group."""
LinearLayer = Callable[[Tensor], Tensor]
MakeLinear = Callable[[Tensor | Grouped, Tensor | None], LinearLayer]
"""(weight [out, in], bias [out]) -> the layer, `ssd.layers.linear.Linear` or another of its kind."""


LISTED = "ids"
"""The tensor that lists the ids that a model predicts, if those are not the first ones."""


def unseen(done: int, total: int) -> None:
    """Ignore progress."""


@dataclass(frozen=True)
class Weights:
    """Tensors below a name `prefix`, read on demand and checked against the shape the family expects.

    `linear` makes linear layers. `names`: the tensors that exist; None: any. `share`: this rank's part
    (`ssd.models.split`). `read_integers`: for whole numbers, if not `read`; `read_groups`: for weights of few bits."""

    read: Reader
    linear: MakeLinear = Linear
    prefix: str = ""
    names: Collection[str] | None = None
    share: Share = WHOLE
    read_integers: Reader | None = None
    read_groups: GroupReader | None = None

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Return the tensor `name`, or this rank's part of it, of `shape`.

        For a tensor split by vocabulary, `shape` is the whole shape. Raises `UsageError` for a missing tensor or
        another shape."""
        whole, pieces = self.share.pieces(self.prefix + name, shape)
        if not pieces:
            return self.read(self.prefix + name, shape)
        read = [self.read(self.prefix + name, whole, piece) for piece in pieces]
        return read[0] if len(read) == 1 else torch.cat(read, dim=len(pieces[0]) - 1)

    def whole(self, name: str, outputs: int, inputs: int) -> Tensor | Groups:
        """Return a weight [outputs, inputs], as `Groups` if the checkpoint has it in groups."""
        groups = self._grouped(name, (outputs, inputs))
        return self(name, outputs, inputs) if groups is None else groups

    def stacked(self, layers: Sequence[tuple[str, int]], inputs: int) -> Tensor | Grouped:
        """Return weights [out, inputs] of (name, outputs) below each other; `Grouped` if all are in groups."""
        if len(layers) == 1:
            return self.whole(f"{layers[0][0]}.weight", layers[0][1], inputs)
        found = [self._grouped(f"{name}.weight", (outputs, inputs)) for name, outputs in layers]
        whole = [groups for groups in found if groups is not None]
        if len(whole) == len(found):
            return stacked(whole)
        return torch.cat([self(f"{name}.weight", outputs, inputs) for name, outputs in layers])

    def _grouped(self, name: str, shape: tuple[int, ...]) -> Groups | None:
        if self.read_groups is None:
            return None
        whole, pieces = self.share.pieces(self.prefix + name, shape)
        return self.read_groups(self.prefix + name, whole, pieces[0] if pieces else ()) if len(pieces) < 2 else None

    def partial_linear(self, weight: Tensor | Grouped, bias: Tensor | None) -> LinearLayer:
        """Make a linear layer whose inputs are split over the ranks; its caller must sum the results."""
        return self.linear(weight, None if self.share.ranks.rank else bias)

    def row_linear(self, weight: Tensor | Grouped, bias: Tensor | None) -> LinearLayer:
        """Make a linear layer whose inputs are split over the ranks, and whose results are summed."""
        partial = self.partial_linear(weight, bias)
        return partial if self.share.ranks.size == 1 else RowParallel(partial, self.share.ranks)

    def embedding(self, table: Table, vocab_size: int) -> LinearLayer:
        """Return the look-up of ids below `vocab_size`; `table` has this rank's rows."""
        ranks = self.share.ranks
        return table if ranks.size == 1 else ParallelEmbedding(table, ranks.part(vocab_size).start, ranks)

    def integers(self, name: str, *shape: int) -> Tensor:
        return (self.read_integers or self.read)(self.prefix + name, shape).long()

    def below(self, prefix: str) -> Weights:
        return replace(self, prefix=f"{self.prefix}{prefix}.")

    def predicting(self, ids: Sequence[int]) -> Weights:
        """Return the same weights with the tensor `LISTED` of `ids`."""

        def integers(name: str, shape: tuple[int, ...]) -> Tensor:
            return torch.tensor(ids) if name == LISTED else (self.read_integers or self.read)(name, shape)

        names = None if self.names is None else {*self.names, LISTED}
        return replace(self, names=names, read_integers=integers)

    def translated(self, ids: Translation, layers: Container[str]) -> Weights:
        """Return the weights in other ids: `layers` have rows of `ids.own`, `LISTED` the predicted ids."""
        rows, read_whole, read_groups = torch.tensor(ids.own), self.read, self.read_groups

        def has_rows(name: str) -> bool:
            return name.rpartition(".")[0].rpartition(".")[2] in layers

        def read(name: str, shape: tuple[int, ...], *piece: Piece) -> Tensor:
            if has_rows(name):
                return read_whole(name, (ids.known, *shape[1:]))[rows]
            return read_whole(name, shape, *piece)

        def groups(name: str, shape: tuple[int, ...], piece: Piece) -> Groups | None:
            if read_groups is None or not has_rows(name):
                return None if read_groups is None else read_groups(name, shape, piece)
            found = read_groups(name, (ids.known, *shape[1:]), ())
            return None if found is None else found.map(lambda part: part[rows])

        return replace(self, read=read, read_groups=groups).predicting(ids.shared)

    def has(self, name: str) -> bool:
        return self.names is None or self.prefix + name in self.names

    def stored(self, name: str) -> bool:
        """Return True if the checkpoint has the tensor; dummy weights are not stored."""
        return self.names is not None and self.prefix + name in self.names


def scaled(integers: Tensor, scales: Tensor) -> Tensor:
    """Return the weight float32 [out, in] from integers [out, in] and scales [out, groups]."""
    return (integers.float().view(*scales.shape, -1) * scales.float()[..., None]).flatten(1)


def from_checkpoint(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    linear: MakeLinear = Linear,
    share: Share = WHOLE,
    progress: Progress = unseen,
) -> Weights:
    """Return weights read from memory-mapped files as `dtype` on `device`; see `StoredTensors`."""
    stored = StoredTensors(checkpoint, dtype, device, share.ranks.size, progress)
    names = checkpoint.tensors
    return Weights(stored.floats, linear, names=names, share=share, read_integers=stored.raw, read_groups=stored.groups)


def dummy(dtype: torch.dtype, device: torch.device, linear: MakeLinear = Linear, share: Share = WHOLE) -> Weights:
    """Return small random weights for `--load-format dummy`.

    A name and shape give the same tensor in every process on a device of the same kind."""

    def read(name: str, shape: tuple[int, ...], piece: Piece = ()) -> Tensor:
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=device)
        # Made on the device: a large model's would take minutes on the host.
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)[piece]

    return Weights(read, linear, share=share)
