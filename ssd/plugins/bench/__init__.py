"""Benchmarks of modes side by side (`ssd bench`, `ssd demo`), also on emulated devices."""

COMMANDS = {
    "bench": (
        "ssd.plugins.bench.command:bench",
        "Measure speed: ar, sd and ssd side by side, with their ids compared.",
    ),
    "demo": ("ssd.plugins.bench.demo:demo", "See what speculation gains over plain decoding."),
}
