"""The draft process: it drafts a speculation for each likely outcome ahead of the target, and may die at any time."""
