"""`ssd plan`: the speed that follows from measurements of a pair, by K, and the choice of `--mode auto`."""

_HELP = "Print what was measured of a pair here, the speed by K, and what auto does."
COMMANDS = {"plan": ("ssd.plugins.plan.command:plan", _HELP)}
