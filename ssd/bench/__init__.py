"""Runs the benchmarks of `ssd bench` and reports them. The command line is in `ssd.cli.bench`."""
