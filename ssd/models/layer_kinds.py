"""Names of the kinds of layers in `layer_types` of a config.json."""

FULL, SLIDING = "full_attention", "sliding_attention"
LINEAR, CONVOLUTION = "linear_attention", "conv"
"""Layers with a state in place of attention: the gated delta rule, a short convolution."""
