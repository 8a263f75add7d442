"""Speed, measured: what `ssd bench` runs, and what it makes of the runs. The command line is `ssd.cli.bench`."""
