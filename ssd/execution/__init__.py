"""Running a model: pages and their prefix cache, the KV cache, ragged batches, graph shapes, runners."""
