"""An engine without a model, to test clients and servers with. Anyone can compute its tokens."""

HELP = "mock: no model, scripted tokens, to test clients."
PACKAGES = {"target": "ssd.plugins.mock"}
