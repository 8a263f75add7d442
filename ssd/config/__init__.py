"""Settings that every process may read: the engine's configuration, sampling parameters, roles, cores and GPUs."""
