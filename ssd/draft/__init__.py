"""The draft process: it drafts ahead of the target for each likely outcome, and may die at any time."""
