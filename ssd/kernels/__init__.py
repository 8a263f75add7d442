"""Kernels of our own, for work that a library would do in many small steps."""
