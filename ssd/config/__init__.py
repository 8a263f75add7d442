"""What every process may know: the engine's configuration, sampling parameters, roles, cores and GPUs."""
