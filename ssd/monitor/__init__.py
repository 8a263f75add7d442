"""Live monitoring of an engine: the supervisor publishes snapshots; the plugin `monitor` reads them."""
