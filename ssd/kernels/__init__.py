"""Kernels of our own, for what a library would do in many small steps."""
