PACKAGES = {"target": "ssd.plugins.remote.edge", "draft": "ssd.plugins.remote.edge.draft"}
