"""The paper as pure functions of plain values and tensors. Only `ssd.kernels.cpu` calls C, where it serves a tensor."""
