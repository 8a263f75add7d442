"""The operating system and the installation: files, memory, interpreters, entry points, test faults."""
