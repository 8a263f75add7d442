"""The draft process: it guesses ahead of the target, for each likely outcome, and may die at any time."""
