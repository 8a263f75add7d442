"""The parts of tools/soak.py: what is asked, who asks, what is killed and measured meanwhile, and what comes of it."""
