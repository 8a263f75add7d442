"""What a GPU would capture of a GPT-2 and a Gemma 3: nothing illegal, and no more launches than these."""

from __future__ import annotations

import pytest

from tests.capture.functions import CONFIGS
from tests.capture.test_capture import check_launches

MODELS = {
    "GPT-2 XL": {
        "model_type": "gpt2",
        **{"hidden_size": 1600, "num_attention_heads": 25, "num_hidden_layers": 48, "vocab_size": 50257},
        "max_position_embeddings": 1024,
    },
    "Gemma 3 1B": {
        "model_type": "gemma3_text",
        **{"hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26, "vocab_size": 262144},
        **{"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512},
        **{"query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh"},
    },
}
# Launches: for each layer, and besides.
CEILINGS = {
    ("gpt2", "verify"): (13, 10),
    ("gpt2", "verify, FP8 cache"): (17, 10),
    ("gpt2", "tree step"): (14, 15),
    ("gpt2", "warm tree step"): (14, 17),
    ("gpt2", "filtered tree step"): (14, 20),
    ("gpt2", "next depth"): (14, 23),
    ("gemma3_text", "verify"): (10, 11),
    ("gemma3_text", "verify, FP8 cache"): (10, 11),
    ("gemma3_text", "tree step"): (11, 30),
    ("gemma3_text", "warm tree step"): (11, 32),
    ("gemma3_text", "filtered tree step"): (11, 35),
    ("gemma3_text", "next depth"): (11, 38),
}


@pytest.mark.parametrize("name", MODELS)
def test_captured_functions_are_legal_and_launch_no_more_than_this(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIGS, name, MODELS[name])
    check_launches(name, CEILINGS)
