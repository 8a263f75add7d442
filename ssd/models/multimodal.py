"""The text part of checkpoints of several modalities, as far as it is a family of ours: images are not read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssd.errors import UsageError

# What the nested config of a `model_type` leaves out where it is as in the family's first model.
_LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
    }
}


def text_part(config: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The config of the text part, with the numbers and lists that stand beside it in `file`. UsageError where that is
    no family of ours."""
    left_out, text = _LEFT_OUT.get(str(config.get("model_type"))), config["text_config"]
    if left_out is None or not isinstance(text, dict):
        known = ", ".join(_LEFT_OUT)
        raise UsageError(
            f"{file} has text_config: models of several modalities are not supported (the text of {known} is)"
        )
    beside = {key: value for key, value in config.items() if not isinstance(value, dict)}
    return {**beside, **left_out, **text}
