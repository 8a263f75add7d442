"""From a person's options to running processes: resolves options, starts and watches the processes."""
