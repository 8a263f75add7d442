"""Parts that an engine does not need to decode: one folder a plugin, found by its entry points.

Neither the core nor a plugin imports a plugin (docs/design.md, "Plugins")."""
