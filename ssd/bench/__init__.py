"""Runs the benchmarks of `ssd bench`; the command line is in `ssd.cli.bench`."""
