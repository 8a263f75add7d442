"""Activations between two products."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ssd.kernels import cpu


def silu_mul(gate_up: Tensor) -> Tensor:
    """[n, 2 * size] -> silu(gate) * up [n, size], gate and up the halves of a row (Shazeer, arXiv 2002.05202)."""
    if cpu.serve(gate_up):
        return cpu.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
