"""Watch an engine: figures, stalls and traces of its snapshots; `ssd top`, with a recording, and `ssd trace`."""

COMMANDS = {
    "top": ("ssd.plugins.monitor.top:top", "Watch a running engine: speed, speculation, and where time goes."),
    "trace": ("ssd.plugins.monitor.trace:trace", "Write what target and draft did, for Perfetto."),
}
