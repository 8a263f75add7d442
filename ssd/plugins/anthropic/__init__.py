"""Anthropic's door: `/v1/messages`, its count of tokens, and the list of models in its shape."""
