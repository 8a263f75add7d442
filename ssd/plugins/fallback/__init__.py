"""Families without a file, as transformers runs them: with the engine's attention, or whole with its own caches.

`entry.py` is what the core finds, a `ssd.models.registry.Fallback`."""
