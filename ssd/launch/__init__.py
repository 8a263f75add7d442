"""From what a person asks for to running processes: resolves options, starts the processes, watches them."""
