"""Parts that an engine does not need to decode: one folder a plugin, found by the entry points of pyproject.toml.

The core imports no plugin, and a plugin no other one. A plugin whose folder was removed is absent, and nothing else
changes. docs/design.md ("Plugins") has the groups of entry points and what a name in each stands for."""
