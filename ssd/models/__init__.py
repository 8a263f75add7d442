"""Model families, their registry, and checkpoints."""
