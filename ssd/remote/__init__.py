"""Drafts and clients on other machines: the link, `ssd draft`, `ssd edge`, and the receiver beside the target."""
