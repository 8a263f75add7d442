"""The parts of tools/gpu_report.py: each a function from a `Job` to rows, run in a process of its own."""
