"""`ssd top`: a running engine at a glance, and a recording of one."""

_HELP = "Watch a running engine: speed, speculation, and where time goes."
COMMANDS = {"top": ("ssd.plugins.top.top:top", _HELP)}
