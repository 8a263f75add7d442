"""An engine without a model, for those who test clients and servers: its tokens can be worked out by anyone."""
