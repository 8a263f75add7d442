"""Splits tensors over ranks, by a table beside the family, when weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ssd.errors import UsageError
from ssd.layers.ranks import SINGLE, Ranks

if TYPE_CHECKING:
    from ssd.models.interface import Shape


class Split(NamedTuple):
    """The dimensions along which weight and bias of a layer are split; None: every rank has all of it.

    `keys`: by key heads; neighbouring ranks share one if there are too few. `vocabulary`: by token ids. `blocks`:
    number of matrices side by side. `fused`: queries, keys and values side by side."""

    weight: int
    bias: int | None
    keys: bool = False
    vocabulary: bool = False
    blocks: int = 1
    fused: bool = False


COLUMN = Split(0, 0)  # weights [out, in], split by outputs
KEYS = Split(0, 0, keys=True)
ROW = Split(1, None)  # by inputs
VOCABULARY = Split(0, None, vocabulary=True)

Splits = Mapping[str, Split]
"""Last part of a layer's name in the checkpoint -> how it is split. Other layers are whole at every rank."""

Piece = tuple[slice, ...]


class Share:
    def __init__(
        self, ranks: Ranks = SINGLE, splits: Splits | None = None, key_heads: int = 1, heads: int | None = None
    ) -> None:
        self.ranks, self._splits, self._heads = ranks, splits or {}, (heads or key_heads, key_heads)
        self._key_parts = min(ranks.size, key_heads)

    @classmethod
    def of(cls, family: type, config: Mapping[str, Any], ranks: Ranks | None) -> Share:
        """Return the share of `ranks`. Raises `UsageError` unless the class itself, no base, has `splits`."""
        if ranks is None or ranks.size == 1:
            return WHOLE
        if "splits" not in vars(family):
            raise UsageError(f"{family.__name__} has no table of splits over ranks: use --tensor-parallel-size 1")
        heads = int(config["num_attention_heads"])
        return cls(ranks, vars(family)["splits"], int(config.get("num_key_value_heads") or heads), heads)

    def size(self, count: int, name: str) -> int:
        """Return this rank's part of `count`; raise `UsageError` if it is no whole number."""
        return self._divided(count, name, self.ranks.size)

    def _divided(self, count: int, name: str, parts: int) -> int:
        if count % parts or self.ranks.size % parts:
            raise UsageError(f"{name} {count} cannot be divided among {self.ranks.size} ranks (tensor-parallel-size)")
        return count // parts

    def shape(self, shape: Shape) -> Shape:
        if shape.outputs < self.ranks.size:
            raise UsageError(f"a vocabulary of {shape.outputs} cannot be divided among {self.ranks.size} ranks")
        heads = self.size(shape.heads, "num_attention_heads")
        kv_heads = self._divided(shape.kv_heads, "num_key_value_heads", self._key_parts)
        return replace(shape, heads=heads, kv_heads=kv_heads)

    def pieces(self, name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], list[Piece]]:
        """Return the shape of the whole tensor `name`, and the pieces of it that make up this rank's part.

        `shape`: of this rank's part, or of the whole if it is split by vocabulary. Pieces lie side by side in the last
        dimension that they index. Without pieces this rank has the whole tensor."""
        layer, _, kind = name.rpartition(".")
        split = self._splits.get(layer.rpartition(".")[2]) if self.ranks.size > 1 else None
        dimension = None if split is None else split.weight if kind == "weight" else split.bias
        if split is None or dimension is None:
            return shape, []
        before = (slice(None),) * dimension
        if split.vocabulary:
            mine = self.ranks.part(shape[dimension])
            return shape, [(*before, slice(mine.start, mine.stop))]
        pieces, start = [], 0
        for width, parts in self._blocks(split, shape[dimension]):
            here = start + self.ranks.rank * parts // self.ranks.size * width
            pieces.append((*before, slice(here, here + width)))
            start += width * parts
        return (*shape[:dimension], start, *shape[dimension + 1 :]), pieces

    def _blocks(self, split: Split, size: int) -> list[tuple[int, int]]:
        """Return (size of a part, number of parts) of each matrix; this rank has `size` in all."""
        if not split.fused:
            return [(size // split.blocks, self._key_parts if split.keys else self.ranks.size)] * split.blocks
        queries, keys = self._heads[0] // self.ranks.size, self._heads[1] // self._key_parts
        dim = size // (queries + 2 * keys)
        return [(queries * dim, self.ranks.size), *[(keys * dim, self._key_parts)] * 2]


WHOLE = Share()
