"""Building blocks of models: plain objects over tensors, for inference only."""
