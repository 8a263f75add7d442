"""What the arenas beside the board look like: numbers for whoever makes room for them, without torch."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from ssd.config import ITEM_BYTES, DType, EngineConfig
from ssd.ipc.board import Key
from ssd.params import Speculation

LAW_WORDS = 2 + len(Key._fields)  # version, token, key


class Layout(NamedTuple):
    """So many `words` of 64 bits, in memory of the host whatever the carrier, and rows of numbers `shape`. Of a memory
    file, where the rows follow the words, only what is written takes any room."""

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
    """Whether target and draft both are, so that the rows may lie on one, too."""
    return "cpu" not in (device, draft_device)


def law_layout(slots: int, speculation: Speculation, vocab_size: int) -> Layout:
    """[slots, entries, depth, V]: `speculation` bounds the chains and their depth, and the last entry is the line's."""
    places = slots, speculation.chains + 1, speculation.longest
    return Layout(prod(places) * LAW_WORDS, (*places, vocab_size))


def feature_layout(config: EngineConfig) -> Layout:
    """[places, width]: a row for every place of the target's KV cache, in the target's own type; a version and a tag
    for each, and the pages of every slot."""
    assert config.features is not None
    cells = config.num_pages * config.page_size
    return Layout(2 * cells + prod(table_shape(config)), (cells, config.features.width), config.dtype)


def table_shape(config: EngineConfig) -> tuple[int, int]:
    """(slots, pages) of the table of pages."""
    return config.max_num_seqs, -(-config.max_model_len // config.page_size)
