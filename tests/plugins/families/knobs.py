"""Every option of the plugin's families, each in a tiny checkpoint."""

from __future__ import annotations

from tests.models.knobs import DEFAULT, FULL, SLIDING, THETA, YARN, Knobs

GRANITE = {"embedding_multiplier": 4.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 3.0}
OLMO3 = {"sliding_window": 5, "layer_types": [SLIDING, FULL]}
FAMILIES: Knobs = {
    "granite": ("granite", GRANITE),
    "granite tied, bias, eps": (
        "granite",
        GRANITE | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 0.1},
    ),
    "granite yarn": ("granite", GRANITE | {"rope_parameters": YARN}),
    "olmo2": ("olmo2", {}),
    "olmo2 with one key head": ("olmo2", {"num_key_value_heads": 1}),
    "olmo2 tied, bias, eps": ("olmo2", {"tie_word_embeddings": True, "attention_bias": True, "rms_norm_eps": 0.1}),
    "olmo3": ("olmo3", OLMO3),
    "olmo3 yarn": ("olmo3", OLMO3 | {"rope_parameters": {FULL: YARN, SLIDING: DEFAULT | THETA}}),
    "olmo3 every fourth layer": ("olmo3", {"sliding_window": 5, "num_hidden_layers": 4}),
}
