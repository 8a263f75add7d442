"""`ssd edge`: a frontend and a draft here, their target on another machine."""

PACKAGES = {"target": "ssd.plugins.remote.edge", "draft": "ssd.plugins.remote.edge.draft"}
