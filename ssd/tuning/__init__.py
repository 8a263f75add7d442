"""Measures the pair, and chooses from that: plan, number of cores, format of the draft."""
