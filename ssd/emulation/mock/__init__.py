"""An engine without a model, to test clients and servers with. Anyone can compute its tokens."""

PACKAGES = {"target": "ssd.emulation.mock"}
