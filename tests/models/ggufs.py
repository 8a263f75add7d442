"""Tiny random models as GGUF files, in any of the types that are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.models import tiny
from tests.models.gguf_writer import write_gguf

# Rows of whole blocks of 32.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 300, "tie_word_embeddings": False}


def write(file: Path, kind: str = "F32", tokenizer: Path | None = None, seed: int = 0, **fields: float | str) -> Path:
    """Tables in `kind`, norms in F32, and the tokenizer of a checkpoint in the metadata. `fields`: other metadata,
    `__` for `.`. -> the checkpoint it is made from, in a folder beside it."""
    directory = tiny.llama(file.with_suffix(".from"), seed=seed, **SIZES)
    write_gguf(directory, file, kind, tokenizer, {name.replace("__", "."): value for name, value in fields.items()})
    return directory


def write_model(
    file: Path,
    model_type: str,
    kind: str = "F32",
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray | None] | None = None,
    **config: Any,
) -> Path:
    """The same of another `model_type`, with fields of its `config`; with other `metadata`, and other `tensors` in F32
    (None: without that one)."""
    directory = tiny.model(model_type, file.with_suffix(".from"), **SIZES | config)
    write_gguf(directory, file, kind, metadata=metadata, tensors=tensors)
    return directory


def add_tensor(writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: str) -> None:
    known = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, gguf.quantize(array, known), raw_dtype=known)


def rounded(array: np.ndarray, kind: str) -> np.ndarray:
    """What is left of the numbers in a type."""
    known = gguf.GGMLQuantizationType[kind]
    return gguf.dequantize(gguf.quantize(array, known), known).reshape(array.shape)
