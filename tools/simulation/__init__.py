"""Target and draft devices as processes of a discrete-event simulation (docs/simulation.md)."""
