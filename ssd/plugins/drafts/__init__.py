"""Drafts that read hidden states of their target: EAGLE-3 heads, MTP heads, block drafters. `kinds.py` is the entry."""
