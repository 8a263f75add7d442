"""What `tools/compare_peers.py` is made of: other engines and this one, each in a process of its own."""
