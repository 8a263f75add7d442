"""The stages of `tools/distill.py`, one a file: corpus -> teacher -> training -> evaluation -> card."""
