"""What a GPU would capture of a GPT-2: nothing illegal, and no more launches than these."""

from __future__ import annotations

import pytest

from tests.capture.functions import CONFIGS
from tests.capture.test_capture import check_launches

XL = {
    "model_type": "gpt2",
    **{"hidden_size": 1600, "num_attention_heads": 25, "num_hidden_layers": 48, "vocab_size": 50257},
    "max_position_embeddings": 1024,
}
# Launches: for each layer, and besides.
CEILINGS = {
    ("gpt2", "verify"): (13, 10),
    ("gpt2", "verify, FP8 cache"): (17, 10),
    ("gpt2", "tree step"): (14, 15),
    ("gpt2", "warm tree step"): (14, 17),
    ("gpt2", "filtered tree step"): (14, 20),
    ("gpt2", "next depth"): (14, 23),
}


def test_captured_functions_are_legal_and_launch_no_more_than_this(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIGS, "GPT-2 XL", XL)
    check_launches("GPT-2 XL", CEILINGS)
