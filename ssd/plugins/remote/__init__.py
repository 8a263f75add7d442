"""Drafts and clients on other machines: the link, `ssd draft`, `ssd edge`, and the receiver beside the target."""

COMMANDS = {
    "draft": ("ssd.plugins.remote.cli:draft", "Draft on this machine for a target on another one."),
    "edge": ("ssd.plugins.remote.cli:edge", "Serve here what a target on another machine verifies, with a draft here."),
}
