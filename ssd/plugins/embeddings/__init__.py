"""Doors to vectors of texts: `/v1/embeddings`, and Ollama's `/api/embed` and `/api/embeddings`."""
