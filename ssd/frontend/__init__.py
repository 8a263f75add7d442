"""The frontend process: what stands between clients and the target. Nothing here imports torch."""
