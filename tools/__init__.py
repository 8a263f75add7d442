"""Programs to run from a clone, a folder each: `python -m tools.NAME --help`."""
