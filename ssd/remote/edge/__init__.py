"""`ssd edge`: a frontend and a draft here, their target on another machine."""

PACKAGES = {"target": "ssd.remote.edge", "draft": "ssd.remote.edge.draft"}
