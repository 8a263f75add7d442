"""What runs a model: pages and their prefix cache, the KV cache, the ragged batch, the runner."""
