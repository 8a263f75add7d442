"""Structured output: which tokens a grammar allows next. `llguidance` does the work."""
