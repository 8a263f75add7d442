"""The receiver: the process beside the target that stands for a draft on another machine."""

PACKAGES = {"draft": "ssd.plugins.remote.receiver"}
