"""Hold the settings that every process may read."""
