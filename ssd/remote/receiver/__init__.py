"""The receiver: what a target has beside it in place of a draft that is on another machine."""
