"""The parts of tools/load.py: what is asked, how it travels, what comes of it."""
