"""The algorithm, pure (contract C5): plain values and tensors in, plain values and tensors out."""
