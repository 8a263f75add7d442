"""The draft process: guesses ahead of the target, for every likely outcome, and may vanish at any time."""
