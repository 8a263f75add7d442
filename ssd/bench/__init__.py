"""What `ssd bench` runs, and what it makes of the runs. The command line is in `ssd.cli.bench`."""
