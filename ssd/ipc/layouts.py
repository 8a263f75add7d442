"""Sizes of the arenas that target and draft share beside the board. No torch: the supervisor needs them."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from ssd.config.engine import ITEM_BYTES, DType, EngineConfig
from ssd.config.params import Speculation
from ssd.ipc.board import Key

DRAFT_PROBS_WORDS = 2 + len(Key._fields)  # version, token, key


class Layout(NamedTuple):
    """`words` of 64 bits in host memory, and rows of numbers of `shape` and `dtype`, behind them in a memory file."""

    words: int
    shape: tuple[int, ...]
    dtype: DType = "float32"

    @property
    def word_bytes(self) -> int:
        return 8 * self.words

    @property
    def row_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.word_bytes + self.row_bytes


def on_gpus(device: str, draft_device: str) -> bool:
    return "cpu" not in (device, draft_device)


def draft_probs_layout(slots: int, speculation: Speculation, vocab_size: int) -> Layout:
    """Return the layout [slots, entries, depth, V] for the most chains and depth; the last entry is the trunk's."""
    places = slots, speculation.chains + 1, speculation.longest
    return Layout(prod(places) * DRAFT_PROBS_WORDS, (*places, vocab_size))


def feature_layout(config: EngineConfig) -> Layout:
    """Return the layout [slots of the target's KV cache, width], in the target's dtype.

    Its words are a version and a tag for each row, then the page table of every sequence."""
    assert config.features is not None
    rows = config.num_pages * config.page_size
    return Layout(2 * rows + prod(table_shape(config)), (rows, config.features.width), config.dtype)


def table_shape(config: EngineConfig) -> tuple[int, int]:
    """Return the shape of the page table: (sequences, pages of each)."""
    return config.max_num_seqs, -(-config.max_model_len // config.page_size)
