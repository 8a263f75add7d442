"""Chooses settings while the engine runs: lookahead, fan-out, backup, eviction, cascade and overlap."""
