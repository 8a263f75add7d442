"""Runs models over ragged batches."""
