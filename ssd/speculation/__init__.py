"""Implements the paper as pure functions of plain values and tensors."""
