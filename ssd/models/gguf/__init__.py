"""GGUF files: header, blocks, tensors, tokenizer."""
