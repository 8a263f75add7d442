"""Implements the paper as pure functions of plain values and tensors; only `ssd.kernels.cpu` calls C for them."""
