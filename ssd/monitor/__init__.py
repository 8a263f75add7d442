"""Live monitoring of an engine: the supervisor publishes snapshots, watchers turn them into figures."""
